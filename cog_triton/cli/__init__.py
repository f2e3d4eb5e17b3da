"""The ``cog-triton`` command: one module for each of its commands."""
