"""The ``cog-triton`` command line: all of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from cog_triton import __version__
from cog_triton.cli.bench import bench
from cog_triton.cli.build import build
from cog_triton.cli.client import client
from cog_triton.cli.doctor import doctor
from cog_triton.cli.init import init
from cog_triton.cli.inspect import inspect_engine
from cog_triton.cli.prune import prune
from cog_triton.cli.schema import schema
from cog_triton.cli.serve import serve
from cog_triton.system import log_format
from cog_triton.system.terminal import out

app = typer.Typer(
    help="From a YAML file to a served LLM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"cog-triton {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """From a YAML file to a served LLM."""
    log_format.configure_from_environment("console")


app.command()(build)
app.command()(init)
app.command()(schema)
app.command()(serve)
app.command(name="inspect")(inspect_engine)
app.command()(bench)
app.command()(client)
app.command()(doctor)
app.command()(prune)
