"""List the paths of one part of NGC's root file system, NUL-separated, for `tar --files-from`.

    python split_rootfs.py PARTS_JSON ROOTFS PART runner|builder [SM]

A path belongs to the first part of the table that has a pattern for it or for a directory above
it. A pattern is a path with * within one name, ** for any directories, {a,b} alternatives and
{site}. What serving does not need is dropped, except licences, which stay wherever they are, and
what the table keeps: headers that kernels are compiled with while serving. A
builder for one SM drops TensorRT's builder resources of the others.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_RESOURCE = re.compile(r"libnvinfer_builder_resource[^/]*_sm(\d+)[^/]*$")


def expand(pattern: str) -> list[str]:
    """The pattern with its {a,b} alternatives, which may be nested, written out."""
    innermost = re.search(r"\{([^{}]*)\}", pattern)
    if innermost is None:
        return [pattern]
    before, after = pattern[: innermost.start()], pattern[innermost.end() :]
    options = [expand(before + option + after) for option in innermost[1].split(",")]
    return list(dict.fromkeys(itertools.chain.from_iterable(options)))


class Patterns:
    """A set of patterns; contains the paths that match one, or are below one that does."""

    def __init__(self, patterns: Iterable[str]) -> None:
        texts = itertools.chain.from_iterable(map(expand, patterns))
        self._regex = re.compile("|".join(f"(?:{_regex(text)})" for text in texts) or r"(?!)")

    def __contains__(self, path: str) -> bool:
        return self._regex.match(path) is not None


def _regex(pattern: str) -> str:
    words = {"**/": r"(?:[^/]+/)*", "*": r"[^/]*", "?": r"[^/]"}
    pieces = re.split(r"(\*\*/|\*|\?)", pattern)
    return "".join(words.get(piece) or re.escape(piece) for piece in pieces) + r"(?:/|$)"


def walk(root: Path, below: str = "") -> Iterator[str]:
    """Every path under `root`, relative to it, parents first, sorted."""
    with os.scandir(root / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = f"{below}/{entry.name}" if below else entry.name
        yield path
        if entry.is_dir(follow_symlinks=False):
            yield from walk(root, path)


class PartTable:
    """Parts and dropped paths of ngc-parts.json, for one kind of image and one SM."""

    def __init__(self, table: dict[str, Any], kind: str, sm: str | None = None) -> None:
        def patterns(texts: Iterable[str]) -> Patterns:
            return Patterns(text.replace("{site}", table["site"]) for text in texts)

        self._parts: list[tuple[str, Patterns]] = [
            (part["name"], patterns(part["paths"])) for part in table["parts"]
        ]
        self._dropped = patterns(table["dropped"]["always"] + table["dropped"].get(kind, []))
        self._kept = patterns(table["kept"])
        self._licences = re.compile("|".join(map(fnmatch.translate, table["licences"])))
        self._sm = sm

    def part_of(self, path: str) -> str:
        """The name of the first part that has the path."""
        return next(name for name, patterns in self._parts if path in patterns)

    def is_dropped(self, path: str) -> bool:
        """Whether the image goes without this path."""
        if any(self._licences.match(name) for name in path.split("/")):
            return False
        if path in self._kept:
            return False
        resource = _RESOURCE.search(path)
        if resource and self._sm not in (None, resource[1]):
            return True
        return path in self._dropped

    def paths(self, root: Path, part: str) -> Iterator[str]:
        """What the part keeps, each path after the directories that lead to it."""
        written: set[str] = set()
        for path in walk(root):
            if self.part_of(path) == part and not self.is_dropped(path):
                steps = itertools.accumulate(path.split("/"), "{}/{}".format)
                for step in steps:
                    if step not in written:
                        written.add(step)
                        yield step


def main(table_file: str, root: str, part: str, kind: str, sm: str | None = None) -> None:
    """Print the paths of a part, each with a NUL after it."""
    table = json.loads(Path(table_file).read_text("utf-8"))
    names = [item["name"] for item in table["parts"]]
    if part not in names or kind not in ("runner", "builder"):
        raise SystemExit(f"{part} {kind}: the parts are {', '.join(names)}, of runner or builder")
    sys.stdout.write(
        "".join(f"{path}\0" for path in PartTable(table, kind, sm).paths(Path(root), part))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
