"""The serving process, Cog's worker: predictor, supervisor, admission control."""
