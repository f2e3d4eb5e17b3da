"""Benchmark of a served model: load generator, metrics and report."""
