"""Fault injection under load: scenarios in YAML against a real server (docs/reliability.md)."""
