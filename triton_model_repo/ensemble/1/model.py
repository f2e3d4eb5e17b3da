"""Triton model `ensemble`; the code is in the package."""

from cog_triton.backend.text_model import TritonPythonModel as TritonPythonModel
