"""The builder's Cog predictor; everything is in cog_triton.build."""

from cog_triton.build.predictor import Predictor

__all__ = ["Predictor"]
