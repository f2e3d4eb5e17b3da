"""``cog-triton usage``: what each tenant has used, from the request log."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from cog_triton.errors import InvalidArgument
from cog_triton.system.terminal import out

COLUMNS = ("requests", "errors", "refused", "prompt_tokens", "output_tokens", "queue_s", "engine_s")
_NOBODY = "-"
_MOST = 1e12


def usage(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of the log (LOG_FORMAT=json); without, stdin."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only what was logged from this time on, as 2027-01-31.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object, by tenant.")] = False,
) -> None:
    """Sum up what each tenant has used: requests, tokens, seconds in the queue and in the engine.

    It reads the log of requests that a server has written as JSON; other lines are passed over.

    Example: docker logs SERVER 2>&1 | cog-triton usage --since 2027-01-01
    """
    from cog_triton.cli.keys import expiry

    begin = None if since is None else expiry("--since", since)
    found = summed(_lines(logs), begin)
    if as_json:
        out.print_json(json.dumps(found))
        return
    rows: list[tuple[str, ...]] = [("tenant", *COLUMNS)]
    rows += [
        (name, *(f"{values[column]:.10g}" for column in COLUMNS))
        for name, values in sorted(found.items())
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        out.print("  ".join([name.ljust(widths[0]), *cells]), highlight=False, soft_wrap=True)


def _lines(logs: list[Path] | None) -> Iterator[str]:
    if not logs:
        yield from sys.stdin
    for log in logs or ():
        try:
            with log.open(encoding="utf-8", errors="replace") as file:
                yield from file
        except OSError as error:
            raise InvalidArgument(f"{log}: {error.strerror}") from error


def summed(lines: Iterable[str], begin: datetime | None = None) -> dict[str, dict[str, float]]:
    """Sums of `COLUMNS` by tenant; `-` is what was of none."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if (event := _event(line)) is None or not _is_after(event, begin):
            continue
        name = str(event.get("tenant", _NOBODY))
        sums = found.setdefault(name, dict.fromkeys(COLUMNS, 0.0))
        failed = event.get("outcome") == "error"
        if event["event"] == "refused" or (failed and "queue_s" not in event):
            sums["refused"] += 1
            continue
        sums["requests"] += 1
        sums["errors"] += failed
        if "queue_s" not in event:  # it left before its turn
            sums["queue_s"] += _number(event, "duration_s")
            continue
        for column in ("prompt_tokens", "output_tokens", "queue_s"):
            sums[column] += _number(event, column)
        sums["engine_s"] += max(0.0, _number(event, "duration_s") - _number(event, "queue_s"))
    return {
        name: {column: round(value, 3) for column, value in sums.items()}
        for name, sums in found.items()
    }


def _event(line: str) -> dict[str, Any] | None:
    """The event of a request, if this line has one."""
    if '"event"' not in line:
        return None
    try:
        found = json.loads(line[line.index("{") :])
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(found, dict) and found.get("event") in ("request", "refused")
    return found if is_ours else None


def _is_after(event: dict[str, Any], begin: datetime | None) -> bool:
    if begin is None:
        return True
    try:
        return datetime.fromisoformat(str(event.get("timestamp"))) >= begin
    except (ValueError, TypeError):
        return False


def _number(event: dict[str, Any], name: str) -> float:
    value = event.get(name)
    return value if isinstance(value, int | float) and abs(value) < _MOST else 0.0
