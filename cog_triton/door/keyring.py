"""API keys of tenants: a file of their hashes, read anew whenever it changes.

A line is a JSON object (docs/tenants.md), blank, or a comment. A directory holds such files, as
that of a mounted Secret. Keys have 256 random bits, so that one SHA-256 is enough to hide them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, ValidationError

from cog_triton.errors import CogTritonError, InvalidArgument
from cog_triton.serving.tenants import Tenant

Api = Literal["predictions", "openai", "triton", "metrics", "adapters", "admin"]
APIS: tuple[Api, ...] = ("predictions", "openai", "triton", "metrics", "adapters", "admin")
MOST_BYTES = 8 << 20
MOST_KEYS = 10_000
_NO_HASH = "0" * 64
_PREFIX = 16
_LOG = logging.getLogger(__name__)


class Key(Tenant):
    """A key, known by the `sha256` of its text alone; its tenant may have several."""

    sha256: str = Field(pattern=r"\A[0-9a-f]{64}\z")
    apis: tuple[Api, ...] = Field(default=("predictions", "openai"), strict=False)
    expires: Annotated[AwareDatetime | None, Field(strict=False)] = None

    @property
    def id(self) -> str:
        """What it is listed and revoked by."""
        return self.sha256[:8]

    @property
    def expired(self) -> bool:
        """Whether it is no longer good."""
        return self.expires is not None and self.expires.timestamp() <= time.time()


def sha256_of(key: bytes) -> str:
    """What a file keeps of a key."""
    return hashlib.sha256(key).hexdigest()


def files_of(path: Path) -> list[Path]:
    """The files of keys at `path`, in order; hidden ones are Kubernetes' own."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if not file.name.startswith("."))


def read_keys(path: Path) -> list[Key]:
    """The keys of a file, or of a directory's; raises E1005 with file, line and rule."""
    try:
        texts = [(file, _bounded(file)) for file in files_of(path)]
    except OSError as error:
        raise InvalidArgument(f"COG_TRITON_KEYS={path}: {error.strerror}") from error
    found: dict[str, Key] = {}
    for file, data in texts:
        for where, key in parse_keys(data, file.name):
            if key.sha256 in found:
                raise InvalidArgument(
                    f"{where}: sha256: the same key as of {found[key.sha256].name}"
                )
            found[key.sha256] = key
            if len(found) > MOST_KEYS:
                raise InvalidArgument(f"{where}: more than {MOST_KEYS} keys")
    return list(found.values())


def _bounded(file: Path) -> bytes:
    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InvalidArgument(f"{file.name}: more than {MOST_BYTES} bytes")
    return data


def parse_keys(data: bytes, name: str) -> Iterator[tuple[str, Key]]:
    """The keys of a file's text, each with file and line; raises E1005.

    A line that is wrong may hold a key by mistake, so no error quotes more than a field's value.
    """
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        where = f"{name}:{number}"
        try:
            yield where, Key.model_validate(json.loads(line))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"])) or "line"
            raise InvalidArgument(f"{where}: {field[:80]}: {first['msg'][:200]}") from None
        except (ValueError, RecursionError):
            raise InvalidArgument(f"{where}: must be a JSON object on one line") from None


@dataclass(frozen=True, slots=True)
class _Table:
    keys: Mapping[str, Key]
    by_name: Mapping[str, Sequence[Key]]

    def find(self, sent: bytes) -> Key | None:
        """The key that was sent, in a time that depends on no key of the table."""
        made = sha256_of(sent)
        found = self.keys.get(made[:_PREFIX])
        same = hmac.compare_digest(made, found.sha256 if found else _NO_HASH)
        return found if same else None


class Keyring:
    """The keys of now; a file that cannot be read leaves those of before, with a line in the log.

    `api_key` is one more with every right, of the tenant `default`.
    """

    def __init__(self, path: Path, api_key: str | None = None) -> None:
        """Raises E1005 where the file is wrong."""
        self._path = path
        self._own: tuple[Key, ...] = ()
        if api_key:
            self._own = (Key(name="default", sha256=sha256_of(api_key.encode()), apis=APIS),)
        self._seen = self._signature()
        self._table = self._read()

    def find(self, sent: bytes) -> Key | None:
        """The key that a client has sent; it may have expired."""
        return self._table.find(sent)

    def named(self, name: str) -> Key | None:
        """The first key of a tenant in the files that has not expired.

        None for COG_TRITON_API_KEY's: whoever may choose a name must not have every right.
        """
        return next((key for key in self._table.by_name.get(name, ()) if not key.expired), None)

    def refresh(self) -> None:
        """Read the files again if they have changed; blocks."""
        try:
            if (seen := self._signature()) == self._seen:
                return
            self._seen = seen
            self._table = self._read()
        except CogTritonError as error:
            _LOG.error("the keys of before stay, as the new ones are wrong: %s", error)
        else:
            _LOG.info("%d keys are in use", len(self._table.keys))

    def _read(self) -> _Table:
        of_files = read_keys(self._path)
        by_name: dict[str, list[Key]] = {}
        for key in of_files:
            by_name.setdefault(key.name, []).append(key)
        keys = [*self._own, *of_files]
        return _Table({key.sha256[:_PREFIX]: key for key in keys}, by_name)

    def _signature(self) -> object:
        """What tells of a change: a Secret's files are links that are replaced."""
        try:
            found = [(str(file), file.stat()) for file in files_of(self._path)]
        except OSError as error:
            return error.errno
        return [(name, one.st_ino, one.st_mtime_ns, one.st_size) for name, one in found]
