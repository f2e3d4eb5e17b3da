"""Triton model `postprocessing`; the code is in the package."""

from cog_triton.backend.postprocessing import TritonPythonModel as TritonPythonModel
