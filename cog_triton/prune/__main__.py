"""``python -m cog_triton.prune``: the command by itself, where no other is installed."""

import typer

from cog_triton.cli_prune import prune

typer.run(prune)
