"""Engines of TensorRT-LLM's LLM API: Hugging Face weights on its PyTorch backend."""
