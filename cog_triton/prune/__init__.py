"""Per-SM pruning of shared objects: what `cog-triton prune` does around `cog_triton.fatbin`."""
