"""The mock server's Cog predictor."""

from cog_triton.serving.coglet.predictor import MockPredictor as Predictor

__all__ = ["Predictor"]
