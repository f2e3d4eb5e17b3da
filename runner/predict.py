"""The runner's Cog predictor."""

from cog_triton.serving.coglet.predictor import Predictor

__all__ = ["Predictor"]
