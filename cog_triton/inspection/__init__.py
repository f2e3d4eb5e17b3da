"""``cog-triton inspect``: what an engine is, for which machine, and whether it is whole."""
