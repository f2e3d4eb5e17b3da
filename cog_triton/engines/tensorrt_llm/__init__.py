"""TensorRT-LLM family: engines served by NVIDIA's C++ backend for Triton."""
