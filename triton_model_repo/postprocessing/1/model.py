"""Triton model `postprocessing`; the code is in the package."""

from cog_triton.triton.models.postprocessing import TritonPythonModel as TritonPythonModel
