"""Triton model `ensemble`; the code is in the package."""

from cog_triton.backend.bls import TritonPythonModel as TritonPythonModel
