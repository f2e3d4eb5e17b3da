"""Metrics, request log and traces of the serving process."""
