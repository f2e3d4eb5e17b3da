"""CPU example family: a model to GGUF of other weights, to an OpenVINO engine."""
