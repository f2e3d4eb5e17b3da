"""``python -m cog_triton`` is the ``cog-triton`` command."""

from cog_triton.cli.app import app

app(prog_name="cog-triton")
