"""The ``cog-triton`` command line: one module for each command."""
