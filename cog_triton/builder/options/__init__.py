"""Command-line options of TensorRT-LLM's scripts: probed, or recorded as data."""
