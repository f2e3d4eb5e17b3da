"""Triton model `tensorrt_llm_bls`; the code is in the package."""

from cog_triton.backend.text_model import TritonPythonModel as TritonPythonModel
