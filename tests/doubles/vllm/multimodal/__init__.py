"""Double of vllm/multimodal."""
