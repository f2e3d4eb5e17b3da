"""The CPU family: a checkpoint becomes GGUF, then quantized GGUF, then an OpenVINO engine."""
