"""Locks that the package carries: pins and hashes of what is fetched when it is first needed."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cog_triton.system.paths import data_file

_ENTRY = re.compile(r"^([a-z0-9.-]+)==(\S+)(?: \\\n +--hash=sha256:[0-9a-f]{64})+", re.MULTILINE)


def locked(path: Path, names: Sequence[str] = ()) -> str:
    """The entries of the lock at `path`, of the distributions `names` or else of all, as text.

    Raises:
        ValueError: it lacks one of `names`.
    """
    entries = {found[1]: found[0] for found in _ENTRY.finditer(path.read_text("utf-8"))}
    missing = [name for name in names if name not in entries]
    if missing:
        raise ValueError(f"{path}: does not lock {', '.join(missing)}")
    return "".join(f"{entries[name]}\n" for name in names or sorted(entries))


def versions(lock: str) -> dict[str, str]:
    """Version of each distribution of a lock's text."""
    return {found[1]: found[2] for found in _ENTRY.finditer(lock)}


def key(lock: str, python: str = "") -> str:
    """Key of what a lock installs, for a Python such as ``3.12``, by default ours."""
    python = python or f"{sys.version_info.major}.{sys.version_info.minor}"
    return hashlib.sha256(f"{python}\n{lock}".encode()).hexdigest()[:12]


def vllm_lock() -> Path:
    """The lock of vLLM with all that it needs, for Python 3.12."""
    return data_file("requirements/vllm-py312.lock")
