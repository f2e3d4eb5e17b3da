"""Observability of the serving process: Prometheus metrics, request log, OpenTelemetry traces."""
