"""The runner's Cog predictor; everything is in cog_triton.serving."""

from cog_triton.serving.predictor import Predictor

__all__ = ["Predictor"]
