"""Triton model `vllm_model`; the code is in the package."""

from cog_triton.triton.models.vllm_text import TritonPythonModel as TritonPythonModel
