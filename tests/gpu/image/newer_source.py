"""This tree's source in place of an image's last layer, which moves with every change of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from arguments import REPOSITORY
from digests import sha256
from parts import SITE

_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")
_PROJECTS = ("runner", "builder", "mock_cog_triton")
_MODELS = "triton_model_repo"


def lay_over(root: Path, tree: Path = REPOSITORY) -> dict[str, Any]:
    """Put the source of `tree` where nix/source.nix puts it; returns what that changed.

    Files of `root` may be links to others: they are replaced, never written to.
    """
    package, project = root / SITE / "cog_triton", root / "src"
    before = _files(package) | _files(project)
    for place in (package, project):
        _make_writable(place)
        shutil.rmtree(place)
    _copy(tree / "cog_triton", package)
    for name in (_MODELS, *_PROJECTS):
        _copy(tree / name, package / "_data" / name)
    _copy(tree / "runner", project)
    _copy(tree / _MODELS, project / _MODELS)
    after = _files(package) | _files(project)
    changed = [path for path in after if before.get(path) != after[path]]
    return {
        "files": len(after),
        "changed": len(changed),
        "gone": len(before.keys() - after.keys()),
        "some": sorted(path.relative_to(root).as_posix() for path in changed)[:20],
    }


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=_IGNORED, symlinks=True)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod(0o755 if executable else 0o644)


def _make_writable(directory: Path) -> None:
    for place, _, _ in os.walk(directory):
        Path(place).chmod(0o755)


def _files(directory: Path) -> dict[Path, str]:
    return {path: sha256(path) for path in directory.rglob("*") if path.is_file()}
