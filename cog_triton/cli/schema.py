"""``cog-triton schema``: print JSON schemas of YAML files, for editors."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class Schema(enum.StrEnum):
    """Files that have a JSON schema."""

    BUILD = "build"


def schema(
    what: Annotated[Schema, typer.Argument(help="Which file's schema.")],
) -> None:
    """Print a JSON schema, for editors to check and complete YAML files.

    Example: cog-triton schema build > build.schema.json
    """
    from cog_triton.builder.config import json_schema

    typer.echo(json_schema())
