"""Benchmark of a served model: load generator, metrics, report and plots."""
