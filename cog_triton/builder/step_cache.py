"""What makes a finished step still valid: script, arguments, input and versions, and its output."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from cog_triton import __version__
from cog_triton.builder.plan import Plan, Step
from cog_triton.builder.workspace import locked
from cog_triton.errors import InvalidArgument

_PACKAGES = ("gguf", "numpy", "openvino", "openvino-genai", "openvino-tokenizers", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of everything that can change what a step writes in our own Python."""
    found = {"python": platform.python_version(), "cog_triton": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def of_source(model: Path) -> str:
    """Fingerprint of a model: path, and name, size and time of its files."""
    return _digest([str(model), _listing(model)])


def of_steps(plan: Plan, model: Path) -> list[str]:
    """Fingerprint of what each step would do, the model being at `model`.

    A step's depends on that of the one before it, whatever directory that one wrote.
    """
    before = of_source(model)
    found = []
    for step in plan.steps:
        before = _digest([step.script.name, _code(step), step.args, step.env, before])
        found.append(before)
    return found


def finished(step: Step, fingerprint: str) -> Path | None:
    """What the step wrote, if it ran as `fingerprint` says and its output is untouched since."""
    try:
        stamp = json.loads(_path(step.cwd, step.name).read_text("utf-8"))
        written = step.cwd / str(stamp["written"])
        if stamp["fingerprint"] == fingerprint and stamp["output"] == _listing(written):
            return written
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def remember(step: Step, fingerprint: str, written: Path) -> None:
    """Note that the step has finished, and which directory it wrote."""
    relative = str(written.relative_to(step.cwd))
    _write(
        _path(step.cwd, step.name),
        {"fingerprint": fingerprint, "written": relative, "output": _listing(written)},
    )


def forget(step: Step) -> None:
    """Note that the step is about to run; from here on its output counts as half-finished."""
    _path(step.cwd, step.name).unlink(missing_ok=True)


def elsewhere(step: Step, fingerprint: str, others: Iterable[Path]) -> Step | None:
    """The same step as it has finished in one of `others`, which are work directories."""
    for other in others:
        twin = step.in_directory(other)
        if finished(twin, fingerprint) is not None:
            return twin
    return None


def adopt(step: Step, fingerprint: str, others: Iterable[Path]) -> Path | None:
    """Take over what the same step wrote in one of `others`, by hard links; or None."""
    twin = elsewhere(step, fingerprint, others)
    if twin is None:
        return None
    with contextlib.suppress(InvalidArgument, OSError), locked(twin.cwd):
        found = finished(twin, fingerprint)
        if found is None:
            return None
        written = step.cwd / found.relative_to(twin.cwd)
        forget(step)
        shutil.rmtree(written, ignore_errors=True)
        shutil.copytree(found, written, copy_function=_link_or_copy, symlinks=True)
        remember(step, fingerprint, written)
        return written
    return None


def is_packed(work_dir: Path, fingerprint: str, output: Path) -> bool:
    """Whether `output` is the engine.tar that `remember_packed` noted, untouched."""
    try:
        stamp = json.loads(_path(work_dir, "package").read_text("utf-8"))
        return bool(stamp == _packed(fingerprint, output))
    except (OSError, ValueError):
        return False


def remember_packed(work_dir: Path, fingerprint: str, output: Path) -> None:
    """Note that `output` is the engine of the build whose last step has `fingerprint`."""
    _write(_path(work_dir, "package"), _packed(fingerprint, output))


def _packed(fingerprint: str, output: Path) -> dict[str, Any]:
    stat = output.stat()
    identity = [str(output.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return {"fingerprint": fingerprint, "output": identity, "versions": versions()}


def _path(work_dir: Path, name: str) -> Path:
    return work_dir / "stamps" / f"{name}.json"


def _write(path: Path, value: dict[str, Any]) -> None:
    """All of it or nothing, so that what a kill leaves is never taken for a stamp."""
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value), "utf-8")
    fresh.replace(path)


def _code(step: Step) -> list[Any]:
    """What the step runs: the code of its family, or its command; and the Python around it."""
    path = step.script.path
    if path.suffix != ".py":
        return [*_stat(path), *_surroundings(step)]
    family = sorted(path.parent.glob("*.py"))
    code = [[f.name, hashlib.sha256(f.read_bytes()).hexdigest()] for f in family]
    return [code, *_surroundings(step)]


def _surroundings(step: Step) -> list[Any]:
    """The Python of the step, with what is installed in it."""
    if step.script.python == sys.executable:
        return [versions()]
    python = Path(step.script.python)
    packages = sorted(python.parent.parent.glob("lib/python3.*/site-packages"))
    return [str(python), __version__, *map(_stat, packages)]


def _stat(path: Path) -> list[Any]:
    with contextlib.suppress(OSError):
        stat = path.stat()
        return [str(path), stat.st_size, stat.st_mtime_ns]
    return [str(path)]


def _listing(root: Path) -> list[list[Any]]:
    paths = sorted(root.rglob("*")) if root.is_dir() else [root]
    files = [(path, path.stat()) for path in paths if path.is_file()]
    return [[str(path.relative_to(root)), s.st_size, s.st_mtime_ns] for path, s in files]


def _link_or_copy(file: str, to: str) -> None:
    try:
        os.link(file, to)
    except OSError:  # no hard links here
        shutil.copy2(file, to)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
