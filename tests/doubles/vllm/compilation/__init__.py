"""Double of vllm/compilation."""
