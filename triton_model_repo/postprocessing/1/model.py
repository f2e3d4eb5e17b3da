"""Triton model `postprocessing`; the code is in the package."""

from cog_triton.backend import text_processing

TritonPythonModel = text_processing.Postprocessing
