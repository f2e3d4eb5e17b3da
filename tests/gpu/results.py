"""What was seen, written to a file after everything that adds to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Results:
    """Results by phase; a file that is there already is gone on with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}

    def phase(self, name: str) -> Phase:
        """An empty phase, in place of what was seen of it before."""
        self.seen[name] = {}
        return Phase(self, name)

    def write(self) -> None:
        """Replace the file by what is known now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.seen, indent=1) + "\n", "utf-8")
        new.replace(self.path)


class Phase:
    """One phase's part of the results."""

    def __init__(self, results: Results, name: str) -> None:
        self._results = results
        self.name = name

    @property
    def seen(self) -> dict[str, Any]:
        """All of it."""
        found: dict[str, Any] = self._results.seen[self.name]
        return found

    def put(self, name: str, value: Any) -> None:
        """Keep a value."""
        self.seen[name] = value
        self._results.write()

    def add(self, name: str, value: Any) -> None:
        """Keep one more value in a list."""
        self.seen.setdefault(name, []).append(value)
        self._results.write()

    def check(self, name: str, holds: bool, seen: object = "") -> bool:
        """Tell and keep whether something holds, and what was seen where it does not."""
        told = "" if holds else f"  {_shortened(str(seen), 900)}"
        print(f"  {'ok  ' if holds else 'FAIL'}  {name}{told}", flush=True)
        checks = self.seen.setdefault("checks", {})
        checks[name] = True if holds else _shortened(str(seen), 3000)
        self._results.write()
        return holds

    @property
    def failed(self) -> list[str]:
        """Names of the checks that did not hold."""
        return [name for name, held in self.seen.get("checks", {}).items() if held is not True]


def _shortened(text: str, size: int) -> str:
    """Its begin and its end, which is where a log has the reason."""
    left = size // 3
    return text if len(text) <= size else f"{text[:left]} ... {text[left - size :]}"
