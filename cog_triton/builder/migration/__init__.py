"""Migration of build configs to vLLM and to TensorRT-LLM's LLM API."""
