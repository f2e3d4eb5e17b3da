"""``cog-triton``, run in this process as on a terminal without colours."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from cog_triton.cli.app import app


def ran(*arguments: object, columns: int = 80) -> Result:
    """The end of a command, and what it wrote; an exception that it ends with is raised."""
    environment = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": str(columns)}
    result = CliRunner().invoke(app, [*map(str, arguments)], env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
