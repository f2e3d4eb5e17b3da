"""Triton model `preprocessing`; the code is in the package."""

from cog_triton.backend.preprocessing import TritonPythonModel as TritonPythonModel
