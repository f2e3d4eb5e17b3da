"""The builder's Cog predictor; everything is in cog_triton.builder."""

from cog_triton.builder.predictor import Predictor

__all__ = ["Predictor"]
