"""``cog-triton doctor``: what this machine can run, and what to do where it cannot."""
