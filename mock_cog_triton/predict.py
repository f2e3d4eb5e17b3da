"""The mock server's Cog predictor; everything is in cog_triton.serving."""

from cog_triton.serving.mock_predictor import MockPredictor as Predictor

__all__ = ["Predictor"]
