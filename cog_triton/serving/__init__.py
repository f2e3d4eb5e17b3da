"""Serving process (Cog's worker): predictors, admission control, supervisor, text generation."""
