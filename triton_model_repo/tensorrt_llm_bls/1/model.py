"""Triton model `tensorrt_llm_bls`; the code is in the package."""

from cog_triton.backend.bls import TritonPythonModel as TritonPythonModel
