"""The ``cog-triton`` command line: all of its commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cog_triton import __version__
from cog_triton.cli.accounts import keys, usage
from cog_triton.cli.bench import bench
from cog_triton.cli.build import build
from cog_triton.cli.examine import doctor, inspect_engine
from cog_triton.cli.init import init, schema
from cog_triton.cli.migrate import migrate
from cog_triton.cli.push import push
from cog_triton.cli.serve import serve
from cog_triton.cli.setup import setup
from cog_triton.errors import MissingExtra
from cog_triton.removed import check_arguments
from cog_triton.system import log_format
from cog_triton.system.terminal import coded_errors, out


def _dashed(token: str) -> str:
    """Spelling of an option as it is documented: ``--model_repo`` is ``--model-repo``."""
    return token.replace("_", "-")


class _Commands(TyperGroup):
    """The commands: a coded error of any is its end, one line and exit code 1.

    A name that was removed is refused with what to use instead.
    """

    def invoke(self, ctx: Any) -> Any:
        with coded_errors():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        check_arguments(args)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="From a YAML file to a served LLM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": _dashed},
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


def _add(command: Callable[..., Any], name: str | None = None) -> None:
    """Add a command; its help is its docstring, whose paragraphs fill the terminal's width."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name=name, help=text)(command)


def _prune_is_absent(
    _arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Not in this installation, as in images: removal of device code for other GPUs."""
    raise MissingExtra(
        "cog-triton prune: this installation lacks the package cog_triton_prune, as images do,"
        " which are pruned already; the wheel of cog-triton and its checkout have it"
    )


_add(build)
_add(init)
_add(migrate)
_add(schema)
_add(serve)
_add(setup)
_add(push)
_add(inspect_engine, "inspect")
_add(bench)
_add(doctor)
_add(usage)
app.add_typer(keys, name="keys")
try:
    from cog_triton_prune.__main__ import prune
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "cog_triton_prune":
        raise
    app.command("prune", context_settings={"ignore_unknown_options": True})(_prune_is_absent)
else:
    _add(prune)
