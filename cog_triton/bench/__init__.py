"""Measure a served model: load generator, report, plots."""
