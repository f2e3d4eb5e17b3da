"""Compiler caches: one directory below which every compiler of a vLLM engine writes.

A start of vLLM 0.33 runs five compilers and more, each with a cache of its own in another
place. Triton's is the one that costs: where nobody sets TRITON_CACHE_DIR, torch points it into the
compiled model at the first start and nobody does at the second, which compiles all kernels again.

What they leave is code, pickles among it: the lasting directory is its user's alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cog_triton.errors import EngineIncompatible

_log = logging.getLogger(__name__)
DIRECTORY, MOST_BYTES = "compiler_caches", "compiler_cache_bytes"
"""Parameters of an engine: its lasting directory, none where that is empty, and its bound."""
TRUSTED, REQUIRED = "sealed_manifest", "seal_required"
"""Parameters of an engine: SHA-256 of the manifest whose seals may be used, empty for none, and
"true" where an engine that no seal fits is refused."""
FOLDER = "compiler-caches"
"""Its name in the work directory."""
ROOT = "VLLM_CACHE_ROOT"
PLAN = "VLLM_ENABLE_STARTUP_PLAN"
# None of them is a part of vLLM's hash of what is compiled (vllm/envs.py, compile_factors).
_DIRECTORIES = {
    ROOT: "vllm",  # compiled models, start-up plans, what is known of model classes
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # until vLLM sets its own, below its root
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "CUDA_CACHE_PATH": "cuda",  # the driver's, of PTX
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
    "MINFER_FMHA_CACHE_DIR": "fmha",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "OUTLINES_CACHE_DIR": "outlines",
}
_SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1", PLAN: "1"}


def variables(root: Path) -> dict[str, str]:
    """Environment by which every compiler writes below `root`; to be set before vLLM is imported.

    It also has vLLM keep its start-up plan there, which spares the next start a measurement of
    memory and a capture of graphs. vLLM tells plans apart by its configuration, but neither by
    ``gpu_memory_utilization`` nor by the environment: engines that differ in these need a `root`
    each.
    """
    return {**{name: str(root / place) for name, place in _DIRECTORIES.items()}, **_SWITCHES}


def begin(
    options: Mapping[str, str], arguments: Mapping[str, Any], version: str | None
) -> Path | None:
    """Point the compilers to the lasting directory of an engine, before anything imports vLLM.

    `options` are the engine's parameters, `arguments` those of vLLM. No start evicts the directory
    until this process ends. If there can be none, that is a warning, and vLLM compiles as without.
    A VLLM_CACHE_ROOT of the user's is not one engine's alone, so that nothing is set beside it.
    """
    if not (base := options.get(DIRECTORY)) or ROOT in os.environ:
        return None
    try:
        root = _hold(Path(base), _key(arguments, version, os.environ))
        _evict(Path(base), int(options[MOST_BYTES]))
    except (OSError, EngineIncompatible) as error:
        _log.warning("what vLLM compiles is not kept: %s", error)
        return None
    os.environ.update(variables(root))
    return root


class Kept(NamedTuple):
    """Caches of one engine, when it was started last, and how many bytes they take."""

    root: Path
    used: float
    bytes: int


def kept(base: Path) -> list[Kept]:
    """The engines that have caches in a lasting directory, the one unused for longest first.

    Raises E1305 for a directory that others may write to.
    """
    if not base.exists():
        return []
    require_own(base)
    found = []
    for root in base.iterdir():
        with suppress(FileNotFoundError):
            found.append(Kept(root, root.stat().st_mtime, sum(_sizes(root))))
    return sorted(found, key=lambda one: one.used)


def _sizes(root: Path) -> Iterator[int]:
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):  # which a compiler has just renamed
                yield Path(folder, name).lstat().st_size


def require_own(base: Path) -> None:
    """Raise E1305 for a directory that others may write to, or that is another user's."""
    told = base.lstat()
    if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.geteuid() or told.st_mode & 0o022:
        raise EngineIncompatible(
            f"{base}: must be a directory of this user ({os.geteuid()}) that nobody else may write"
            f" to, since it has code (it is of user {told.st_uid}, mode {told.st_mode & 0o7777:o})"
        )


# The variables of vLLM that say where, not what.
_NOT_IN_KEY = {*_DIRECTORIES, *_SWITCHES, "VLLM_HOST_IP", "VLLM_PORT", "VLLM_API_KEY"}
_IN_KEY = ("VLLM_", "TORCHINDUCTOR_")


def _key(arguments: Mapping[str, Any], version: str | None, environment: Mapping[str, str]) -> str:
    """Name of the directory of an engine: all that a start-up plan depends on, and more."""
    told = {
        "python": sys.version,
        "vllm": version,
        "arguments": {name: it for name, it in arguments.items() if name != "hf_token"},
        "environment": {
            name: value
            for name, value in environment.items()
            if name.startswith(_IN_KEY) and name not in _NOT_IN_KEY
        },
    }
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_LOCK = "in-use.lock"


def _hold(base: Path, name: str) -> Path:
    """The directory `name`, made if need be; no other process evicts it while this one lives."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(base)
    root = base / name
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # it is being evicted
            lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat((root / _LOCK).stat(), os.fstat(lock)):
                    os.utime(root)
                    return root
            os.close(lock)


def _evict(base: Path, most_bytes: int) -> None:
    """Remove what was not used for longest until the rest fits, but nothing that is in use."""
    engines = kept(base)
    total = sum(engine.bytes for engine in engines)
    for engine in engines:
        if total <= most_bytes:
            return
        with suppress(FileNotFoundError, BlockingIOError):
            lock = os.open(engine.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                gone = engine.root.rename(engine.root.with_suffix(f".{secrets.token_hex(4)}"))
                shutil.rmtree(gone, ignore_errors=True)
            finally:
                os.close(lock)
            total -= engine.bytes
            _log.info("%s: evicted, %d MB", engine.root, engine.bytes // 1_000_000)
