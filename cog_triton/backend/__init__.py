"""Triton's Python-backend models, run by tritonserver's stubs, and the engine process."""
