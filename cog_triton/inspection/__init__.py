"""``cog-triton inspect``: describes an engine and checks that it is complete."""
