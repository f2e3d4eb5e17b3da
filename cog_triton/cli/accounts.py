"""``cog-triton keys`` and ``usage``: tenants' keys, of whose hashes a file is, and their use."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cog_triton.errors import InvalidArgument
from cog_triton.system.atomic_write import writing
from cog_triton.system.file_lock import waiting
from cog_triton.system.terminal import err, out

if TYPE_CHECKING:
    from cog_triton.front.keyring import Key

_MODE = 0o600
_RANDOM_BYTES = 32
COLUMNS = ("requests", "errors", "refused", "prompt_tokens", "output_tokens", "queue_s", "engine_s")
_NOBODY = "-"
_MOST = 1e12
_FILE = typer.Option("--file", envvar="COG_TRITON_KEYS", help="The file of keys.")
File = Annotated[Path, _FILE]
keys = typer.Typer(
    help="Keys of tenants: a file of their hashes, which a server reads again when it changes.",
    no_args_is_help=True,
)


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="The tenant: letters, digits, `.`, `_`, `-`.")],
    file: File,
    weight: Annotated[float, typer.Option(help="Share of the engine beside others'.")] = 1.0,
    priority: Annotated[int, typer.Option(help="-10, first, to 10.")] = 0,
    api: Annotated[
        list[str] | None,
        typer.Option(
            help="What it is for: predictions, openai, triton, metrics, adapters or admin; may be"
            " given several times.",
            show_default="predictions, openai",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model or adapter that it may name.", show_default="all"),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests a minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Tokens a minute.")] = None,
    concurrent: Annotated[int | None, typer.Option(help="Requests that run or wait.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="The largest prompt.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="Time, as 2027-01-31; local without a zone.")
    ] = None,
) -> None:
    """Make a key, and print it: it is shown this once, and the file has its hash alone.

    Example: cog-triton keys add team-a --weight 2 --file keys
    """
    from cog_triton.front.keyring import sha256_of

    key = f"ct-{secrets.token_urlsafe(_RANDOM_BYTES)}"
    values: dict[str, Any] = {
        "name": name,
        "sha256": sha256_of(key.encode()),
        "weight": weight if weight != 1 else None,
        "priority": priority or None,
        "apis": api,
        "models": model,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
        "max_prompt_tokens": max_prompt_tokens,
        "expires": expires and expiry("--expires", expires).isoformat(),
    }
    line = json.dumps({field: value for field, value in values.items() if value is not None})
    with _changing(file) as lines:
        lines.append(line)
    out.print(key, highlight=False, soft_wrap=True)


@keys.command("list")
def list_keys(file: File) -> None:
    """List the keys of a file, or of a directory of files, by their ids; a key itself is nowhere.

    Example: cog-triton keys list --file keys
    """
    from cog_triton.front.keyring import read_keys

    for key in read_keys(file):
        out.print(_described(key), highlight=False, soft_wrap=True, markup=False)


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The id of a key, or a tenant's name for all of its.")],
    file: File,
) -> None:
    """Remove keys from a file; a server that reads it refuses them within a second.

    Example: cog-triton keys revoke 4c5d0a1b --file keys
    """
    from cog_triton.front.keyring import parse_keys

    with _changing(file) as lines:
        found = [
            number
            for number, line in enumerate(lines)
            for _, each in parse_keys(line.encode(), file.name)
            if key in (each.id, each.name, each.sha256)
        ]
        if not found:
            raise InvalidArgument(f"{key[:80]!r}: no key in {file} has this id or name")
        lines[:] = [line for number, line in enumerate(lines) if number not in found]
    out.print(f"{len(found)} revoked", highlight=False)


@contextmanager
def _changing(file: Path) -> Iterator[list[str]]:
    """The lines of a file to change: it is replaced at once, and only by one that can be read.

    A new one is its user's alone; an old one keeps owner and mode, or its server could not read it,
    and would let revoked keys in.
    """
    from cog_triton.front.keyring import parse_keys

    file = file.resolve()
    if file.is_dir():
        raise InvalidArgument(f"--file={file}: is a directory; name a file in it")
    lock = file.with_name(f".{file.name}.lock")
    with waiting(lock, lambda: err.print("waiting for another change of the file")):
        old = file.stat() if file.exists() else None
        lines = file.read_text("utf-8").splitlines() if old else []
        yield lines
        text = "".join(f"{line}\n" for line in lines).encode()
        for _ in parse_keys(text, file.name):
            pass
        mode = stat.S_IMODE(old.st_mode) if old else _MODE
        with writing(file, len(text), at_most=False, mode=mode) as written:
            if old is not None:
                os.fchown(written.fileno(), old.st_uid, old.st_gid)
            written.write(text)


def _described(key: Key) -> str:
    values = key.model_dump(mode="json", exclude_defaults=True, exclude={"sha256", "name"})
    more = " ".join(f"{name}={_plain(value)}" for name, value in values.items())
    return " ".join(filter(None, (key.id, key.name, more, "EXPIRED" if key.expired else "")))


def _plain(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def expiry(option: str, text: str) -> datetime:
    """A time of the command line: ISO 8601, local without a zone; raises E1005."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"{option}={text[:80]!r}: must be as 2027-01-31") from error


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
