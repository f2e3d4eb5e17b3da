"""Triton model `preprocessing`; the code is in the package."""

from cog_triton.triton.models.preprocessing import TritonPythonModel as TritonPythonModel
