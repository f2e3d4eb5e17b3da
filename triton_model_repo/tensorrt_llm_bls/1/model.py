"""Triton model `tensorrt_llm_bls`; the code is in the package."""

from cog_triton.triton.models.bls import TritonPythonModel as TritonPythonModel
