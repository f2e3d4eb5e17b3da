"""What makes a finished step still valid: script, arguments, input and versions, and its output."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from cog_triton import __version__
from cog_triton.build.plan import Step
from cog_triton.errors import InvalidArgument

_PACKAGES = ("gguf", "numpy", "openvino", "openvino-genai", "openvino-tokenizers", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of everything that can change what a step writes."""
    found = {"python": platform.python_version(), "cog_triton": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def of_source(model: Path) -> str:
    """Fingerprint of a model: path, and name, size and time of its files."""
    return _digest([str(model), _listing(model)])


def of_step(step: Step, input_fingerprint: str) -> str:
    """Fingerprint of what a step would do, given its input's."""
    family = sorted(step.script.parent.glob("*.py"))
    code = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in family}
    return _digest([step.script.name, code, step.argv[2:], input_fingerprint, versions()])


def is_finished(step: Step, fingerprint: str) -> bool:
    """Whether the step has run as `fingerprint` says and its output is untouched since."""
    try:
        stamp = json.loads(_path(step).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return bool(stamp == {"fingerprint": fingerprint, "output": _listing(step.output_dir)})


def remember(step: Step, fingerprint: str) -> None:
    """Note that the step has finished."""
    path = _path(step)
    path.parent.mkdir(exist_ok=True)
    stamp = {"fingerprint": fingerprint, "output": _listing(step.output_dir)}
    path.write_text(json.dumps(stamp), "utf-8")


def forget(step: Step) -> None:
    """Note that the step is about to run; from here on its output counts as half-finished."""
    _path(step).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(work_dir: Path) -> Iterator[None]:
    """Hold `work_dir` for one build.

    Raises:
        InvalidArgument: another build holds it.
    """
    with (work_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidArgument(f"work_dir {work_dir}: another build is running in it") from error
        yield


def _path(step: Step) -> Path:
    return step.cwd / "stamps" / f"{step.name}.json"


def _listing(root: Path) -> list[list[Any]]:
    paths = sorted(root.rglob("*")) if root.is_dir() else [root]
    files = [(path, path.stat()) for path in paths if path.is_file()]
    return [[str(path.relative_to(root)), s.st_size, s.st_mtime_ns] for path, s in files]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
