"""API keys of tenants: a file of their hashes, read anew whenever it changes.

A line is a JSON object (docs/tenants.md), blank, or a comment. A directory holds such files, as
that of a mounted Secret. Keys have 256 random bits, so that one SHA-256 is enough to hide them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, ValidationError

from cog_triton.errors import InvalidArgument
from cog_triton.front.file_reader import FileReader, read_files
from cog_triton.serving.tenants import Tenant
from cog_triton.system.printable import printable

Api = Literal["predictions", "openai", "triton", "metrics", "adapters", "admin"]
APIS: tuple[Api, ...] = ("predictions", "openai", "triton", "metrics", "adapters", "admin")
MOST_BYTES = 8 << 20
MOST_KEYS = 10_000
MOST_FILES = 1000
_NO_HASH = "0" * 64
_PREFIX = 16


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
    """The files of keys at `path`, in order; hidden ones are Kubernetes' own. Raises E1005."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    if len(found) > MOST_FILES:
        raise InvalidArgument(f"COG_TRITON_KEYS={path}: {len(found)} files; {MOST_FILES} at most")
    return found


def read_keys(path: Path) -> list[Key]:
    """The keys of a file, or of a directory's; raises E1005 with file, line and rule."""
    try:
        return _keys_of(read_files(files_of(path), MOST_BYTES))
    except OSError as error:
        raise InvalidArgument(f"COG_TRITON_KEYS={path}: {error.strerror}") from error


def _keys_of(texts: Iterable[tuple[str, bytes]]) -> list[Key]:
    found: dict[str, Key] = {}
    for name, data in texts:
        for where, key in parse_keys(data, name):
            if key.sha256 in found:
                raise InvalidArgument(
                    f"{where}: sha256: the same key as of {found[key.sha256].name}"
                )
            found[key.sha256] = key
            if len(found) > MOST_KEYS:
                raise InvalidArgument(f"{where}: more than {MOST_KEYS} keys")
    return list(found.values())


def parse_keys(data: bytes, name: str) -> Iterator[tuple[str, Key]]:
    """The keys of a file's text, each with file and line; raises E1005.

    A line that is wrong may hold a key by mistake, so no error quotes more than a field's value.
    """
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        where = f"{name}:{number}"
        try:
            yield where, Key.model_validate(json.loads(line, object_pairs_hook=_unique))
        except _Repeated as error:
            raise InvalidArgument(f"{where}: {error}: is there twice") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"])) or "line"
            raise InvalidArgument(f"{where}: {field[:80]}: {first['msg'][:200]}") from None
        except (ValueError, RecursionError):
            raise InvalidArgument(f"{where}: must be a JSON object on one line") from None


class _Repeated(ValueError):
    """A name that an object has twice, of which JSON's readers take one or the other."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(printable(next(each for each in names if names.count(each) > 1)[:80]))
    return made


class Keyring(FileReader):
    """The keys of now; see `FileReader`.

    `api_key` is one more with every right, of the tenant `default`.
    """

    most_bytes = MOST_BYTES
    kept = "the keys of before stay, as the new ones are wrong"
    renewed = "new keys are in use"

    def __init__(self, path: Path, api_key: str | None = None) -> None:
        """Raises E1005 where the file is wrong."""
        self._path = path
        self._own: tuple[Key, ...] = ()
        if api_key:
            self._own = (Key(name="default", sha256=sha256_of(api_key.encode()), apis=APIS),)
        super().__init__(f"COG_TRITON_KEYS={path}")

    def files(self) -> list[Path]:
        return files_of(self._path)

    def take(self, data: Iterable[tuple[str, bytes]]) -> None:
        self._keys = {key.sha256[:_PREFIX]: key for key in (*self._own, *_keys_of(data))}

    def find(self, sent: bytes) -> Key | None:
        """The key that a client has sent; it may have expired. The time depends on no key."""
        made = sha256_of(sent)
        found = self._keys.get(made[:_PREFIX])
        same = hmac.compare_digest(made, found.sha256 if found else _NO_HASH)
        return found if same else None
