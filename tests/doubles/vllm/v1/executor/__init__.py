"""Double of vllm/v1/executor."""
