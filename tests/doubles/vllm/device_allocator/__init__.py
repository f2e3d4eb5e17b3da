"""Double of vllm/device_allocator."""
