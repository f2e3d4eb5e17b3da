"""Registry of LoRA adapters: a file that the serving process writes and engine processes read.

Requests name an adapter; where it is on disk never travels through Triton, whose clients could
name any path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from cog_triton.errors import InvalidArgument, nearest
from cog_triton.system.atomic_write import write_json

REGISTRY = "lora_registry"
"""Parameter of a rendered engine model: the registry's path."""


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """A loaded adapter.

    `number` is its own for as long as the server runs, also if another had its name. `engine_name`
    is what the engine calls it: engines keep keys and values of a prompt by that name, so that an
    adapter that replaces another needs one of its own.
    """

    name: str
    number: int
    directory: Path
    rank: int
    engine_name: str


class AdapterRegistry:
    """Registry file at `path`; read again once it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._adapters: dict[str, RegisteredAdapter] = {}

    def write(self, adapters: Iterable[RegisteredAdapter]) -> None:
        """Replace the registry's content at once."""
        write_json(
            self.path, [{**asdict(each), "directory": str(each.directory)} for each in adapters]
        )

    def adapters(self) -> dict[str, RegisteredAdapter]:
        """The adapters that are loaded now, by name."""
        stat = self.path.stat()
        identity = stat.st_mtime_ns, stat.st_ino, stat.st_size
        if self._seen != identity:
            rows = json.loads(self.path.read_text("utf-8"))
            self._adapters = {
                row["name"]: RegisteredAdapter(**{**row, "directory": Path(row["directory"])})
                for row in rows
            }
            self._seen = identity
        return self._adapters

    def find(self, name: str) -> RegisteredAdapter:
        """An adapter by its name; raises E1005 with the nearest one."""
        known = self.adapters()
        if name not in known:
            raise InvalidArgument(
                f"lora_name={name[:80]!r}: no such adapter{nearest(name, list(known))}"
            )
        return known[name]
