"""CPU example family: checkpoint to GGUF, to quantized GGUF, to an OpenVINO engine."""
