"""Results of a GPU run: results.json (checks, medians) and samples.json (every measurement).

Both are written after each addition, so that a run that is stopped keeps what it measured, and
copied to the directory $OUT, if that is set.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

_LINE = 320
"""Objects that fit this many characters are one line of results.json, which stays small."""


class Results:
    """Results by phase; phases that the file has already are kept until they are run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._samples_path = path.with_name("samples.json")
        self.seen = _read(path)
        self.samples = _read(self._samples_path)

    def phase(self, name: str) -> Phase:
        """An empty phase, in place of its earlier results."""
        self.seen[name], self.samples[name] = {}, []
        return Phase(self, name)

    def write(self) -> None:
        """Replace results.json atomically."""
        _write(self.path, compact(self.seen))

    def write_samples(self) -> None:
        """Replace samples.json atomically."""
        _write(self._samples_path, compact(self.samples))


class Phase:
    """One phase's part of the results."""

    def __init__(self, results: Results, name: str) -> None:
        self._results = results
        self.name = name

    @property
    def seen(self) -> dict[str, Any]:
        """Everything kept for this phase but its samples."""
        found: dict[str, Any] = self._results.seen[self.name]
        return found

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Every single measurement of this phase."""
        found: list[dict[str, Any]] = self._results.samples[self.name]
        return found

    def put(self, name: str, value: Any) -> None:
        """Keep a value."""
        self.seen[name] = value
        self._results.write()

    def add(self, name: str, value: Any) -> None:
        """Append a value to a list."""
        self.seen.setdefault(name, []).append(value)
        self._results.write()

    def add_sample(self, sample: dict[str, Any]) -> None:
        """Keep one measurement."""
        self.samples.append(sample)
        self._results.write_samples()

    def check(self, name: str, holds: bool, seen: object = "") -> bool:
        """Print and keep whether a check holds, with `seen` where it does not; returns `holds`."""
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


def compact(value: Any, indent: str = "") -> str:
    """JSON with one line for each object or list that fits into one."""
    text = json.dumps(value)
    if len(indent) + len(text) <= _LINE or not isinstance(value, (dict, list)):
        return text
    deeper = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {compact(item, deeper)}" for key, item in value.items()]
        begin, end = "{", "}"
    else:
        items, begin, end = [compact(item, deeper) for item in value], "[", "]"
    lines = ",\n".join(deeper + item for item in items)
    return f"{begin}\n{lines}\n{indent}{end}"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(f"{text}\n", "utf-8")
    new.replace(path)
    if out := os.environ.get("OUT"):
        shutil.copy(path, out)


def _shortened(text: str, size: int) -> str:
    """The beginning and the end of `text`; a log has its reason at the end."""
    left = size // 3
    return text if len(text) <= size else f"{text[:left]} ... {text[left - size :]}"
