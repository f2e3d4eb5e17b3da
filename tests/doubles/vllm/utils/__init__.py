"""Double of vllm/utils."""
