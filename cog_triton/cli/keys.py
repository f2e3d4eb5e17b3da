"""``cog-triton keys``: add, list and revoke keys of tenants in a file of their hashes."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
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
