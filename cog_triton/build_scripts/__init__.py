"""Example families, laid out as TensorRT-LLM's: ``<family>/<script>.py``, run as subprocesses."""
