"""Triton model `vllm_model`; the code is in the package."""

from cog_triton.backend.vllm_text_model import TritonPythonModel as TritonPythonModel
