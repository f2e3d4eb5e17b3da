"""Double of vllm/renderers."""
