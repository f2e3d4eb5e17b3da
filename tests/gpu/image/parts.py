"""Parts of an image made of its wheels as Nix makes them, and the peer's of the same, whole."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

SITE = "opt/cog-triton/lib/python3.12/site-packages"
_LARGE = 1_000_000
# As nix/vllm.nix compiles: what it wrote is compared, byte by byte.
_COMPILE = ("-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash")


class Maker:
    """Makes parts in threads, with the image's own Python."""

    def __init__(self, root: Path, index: dict[str, Any]) -> None:
        self._root = root
        self._sm = _variable(index, "COG_TRITON_SM")
        table = index["table"]
        self._tables = {"made": root / "image-table.json", "peer": root / "peer-table.json"}
        self._tables["made"].write_text(json.dumps(table), "utf-8")
        self._pruned = {part["name"] for part in table["parts"] if part.get("pruned")}
        plain = [{"name": part["name"]} for part in table["parts"]]
        whole: dict[str, Any] = {**{key: [] for key in table}, "parts": plain}
        self._tables["peer"].write_text(json.dumps(whole), "utf-8")
        self._source = root / "source"
        self.python = image_python(root / "made" / "base")
        self._threads = ThreadPoolExecutor(8)
        # What the pruner imports is in the layers that were carried, which come first.
        self._sites = [root / "made" / name / SITE for name in index["carried"]]
        self._parts: dict[str, Future[str]] = {}

    def start(self, part: str, wheels: list[Path]) -> None:
        """Begin with a part of the image and the same one of the peer."""
        self._parts[part] = self._threads.submit(self._both, part, wheels)

    def finish(self) -> dict[str, str]:
        """Wait for all parts; what their making printed, by name."""
        told = {part: future.result() for part, future in self._parts.items()}
        self._threads.shutdown()
        return told

    def _both(self, part: str, wheels: list[Path]) -> str:
        kinds = ("made", "peer")
        with ThreadPoolExecutor(2) as threads:
            made = [threads.submit(self._make, kind, part, wheels) for kind in kinds]
            said = [future.result() for future in made]
        share_equal(*(self._root / kind / part for kind in kinds))
        for wheel in wheels:
            wheel.unlink()
        return said[0]

    def _make(self, kind: str, part: str, wheels: list[Path]) -> str:
        began = time.monotonic()
        target = self._root / kind / part
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        paths = [self._root / "tools", self._source, *self._sites]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(map(str, paths))}
        command = [str(self.python), "-s", str(self._source / "nix" / "wheel_part.py")]
        sm = self._sm if part in self._pruned else "any"
        command += [str(self._tables[kind]), part, sm, str(target / SITE)]
        said = _run([*command, *map(str, wheels)], environment)
        _run([str(self.python), *_COMPILE, "-s", str(target), "-p", "/", str(target / SITE)], {})
        _as_in_a_store(target)
        print(f"{time.strftime('%X')} {kind} {part}: {time.monotonic() - began:.0f} s", flush=True)
        return said


def share_equal(one: Path, other: Path) -> None:
    """Keep large files that are the same in both directories on the disk once."""
    for path in one.rglob("*"):
        twin = other / path.relative_to(one)
        if path.is_symlink() or not path.is_file() or path.stat().st_size < _LARGE:
            continue
        if twin.is_file() and filecmp.cmp(path, twin, shallow=False):
            twin.unlink()
            twin.hardlink_to(path)


def image_python(base: Path) -> Path:
    """The image's Python, in the layer `base`; it looks in /nix, which is linked to there."""
    if not Path("/nix").exists():
        Path("/nix").symlink_to(base / "nix")
    return (base / "opt/cog-triton/bin/python").readlink()


def _variable(index: dict[str, Any], name: str) -> str:
    pairs = dict(item.split("=", 1) for item in index["image"]["config"]["Env"])
    return pairs[name]


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])}: {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


def _as_in_a_store(directory: Path) -> None:
    """The modes that Nix gives to files and directories."""
    for place, _, files in os.walk(directory):
        for name in files:
            path = Path(place, name)
            if not path.is_symlink():
                path.chmod(0o555 if path.stat().st_mode & 0o100 else 0o444)
    # Directories stay writable here: links to their files are made in others alone.
