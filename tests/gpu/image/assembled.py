"""Root file systems of an image and its peer out of layers, compared with the image's list."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from digests import sha256

_SHOWN = 40


def finish(root: Path, told: dict[str, str]) -> dict[str, Any]:
    """Merge layers into ROOT/root and ROOT/peer-root; returns the comparison of the former."""
    index = json.loads((root / "image.json").read_text("utf-8"))
    made = [root / "made" / name for name in index["layers"]]
    merge(made, root / "root")
    whole = [root / "peer" / path.name for path in made]
    merge([w if w.is_dir() else m for w, m in zip(whole, made, strict=True)], root / "peer-root")
    lines = (root / "files.jsonl").read_text("utf-8").splitlines()
    found = compare(root / "root", [json.loads(line) for line in lines])
    return {"compared": found, "told": told}


def merge(layers: Iterable[Path], target: Path) -> None:
    """Lay the layers over each other in `target`, as hard links."""
    target.mkdir()
    for layer in layers:
        subprocess.run(["cp", "-al", f"{layer}/.", str(target)], check=True)


def compare(root: Path, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Compare each file below `root` with its row in the image's list.

    Returns numbers by layer (`equal`, `different`, `missing`, of these `bytecode`), the number of
    `extra` files, and the first names of all that are not equal.
    """
    listed = {row["path"].lstrip("./"): row for row in rows if _is_file(row)}
    there = dict(_walk(root))
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    names: defaultdict[str, list[str]] = defaultdict(list)

    def judge(path: str) -> str:
        if path not in there:
            return "missing"
        row = listed[path]
        if (link := row.get("link")) or stat.S_ISLNK(there[path]):
            same = (root / path).is_symlink() and str((root / path).readlink()) == link
            return "equal" if same else "different"
        if sha256(root / path) != row["sha256"].removeprefix("sha256:"):
            return "different"
        mode = row.get("mode")
        octal = int(mode, 8) if isinstance(mode, str) else mode
        same = octal is None or stat.S_IMODE(octal) == stat.S_IMODE(there[path])
        return "equal" if same else "other mode"

    with ThreadPoolExecutor() as threads:
        for path, verdict in zip(listed, threads.map(judge, listed), strict=True):
            counts[listed[path]["layer"]][verdict] += 1
            if path.endswith(".pyc"):
                counts[listed[path]["layer"]][f"{verdict}, bytecode"] += 1
            if verdict != "equal":
                names[verdict].append(path)
    names["extra"] = sorted(there.keys() - listed.keys())
    total = Counter[str]()
    for each in counts.values():
        total += each
    return {
        "total": {**total, "extra": len(names["extra"])},
        "layers": {layer: dict(found) for layer, found in counts.items()},
        "names": {verdict: found[:_SHOWN] for verdict, found in names.items() if found},
    }


def _is_file(row: dict[str, Any]) -> bool:
    return bool(row.get("sha256") or row.get("link"))


def _walk(root: Path) -> Iterator[tuple[str, int]]:
    for place, directories, files in os.walk(root):
        links = [name for name in directories if Path(place, name).is_symlink()]
        for name in (*files, *links):
            path = Path(place, name)
            yield path.relative_to(root).as_posix(), path.lstat().st_mode
