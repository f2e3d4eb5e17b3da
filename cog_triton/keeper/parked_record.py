"""Record of a keeper that outlives servers: which engine it holds, in words that can be compared.

A file that every later server reads before it connects, whatever version wrote it: messages
between processes are for one version only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_FILE = "engine.json"
_SHOWN = 3
_SHOWN_CHARACTERS = 80


def write_record(directory: Path, identity: Mapping[str, str]) -> None:
    """Record that the keeper of `directory` has an engine of this identity."""
    file = directory / f"{_FILE}.new"
    file.write_text(json.dumps(dict(identity), indent=1), "utf-8")
    file.replace(directory / _FILE)


def read_record(directory: Path) -> dict[str, str] | None:
    """Identity of the engine in `directory`; None where none is recorded."""
    try:
        read = json.loads((directory / _FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def remove_record(directory: Path) -> None:
    """Forget it: nobody can have the engine any more."""
    (directory / _FILE).unlink(missing_ok=True)


def differences(parked: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """What tells two identities apart, in words; blank where they are equal."""
    found = [
        f"{name} is {_shown(parked.get(name))} there and {_shown(wanted.get(name))} here"
        for name in sorted(parked.keys() | wanted.keys())
        if parked.get(name) != wanted.get(name)
    ]
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _shown(value: str | None) -> str:
    if value is None:
        return "unset"
    return repr(value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}...")
