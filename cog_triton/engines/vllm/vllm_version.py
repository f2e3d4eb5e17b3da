"""Version of vLLM: which one an engine's Python has, and whether it was ever run."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from cog_triton.engines.vllm.argument_types import minor_version
from cog_triton.errors import EngineIncompatible
from cog_triton.system import isolated_python

ALLOW_UNTESTED = "allow_untested"
"""Argument of the engine's model, and its environment variable."""
UNTESTED = "COG_TRITON_VLLM_UNTESTED"
_PRINT_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"
_TIMEOUT_S = 60


def known_versions() -> Sequence[Mapping[str, str]]:
    """Minor versions that are known to work: what ran, and on what."""
    text = (Path(__file__).parent / "tested_versions.json").read_text("utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def installed_version(engine_python: str = "") -> str | None:
    """Version of the vLLM that a Python has, by package metadata; None if that cannot be told.

    `engine_python` is run as an engine process is; by default the current Python is meant.
    """
    if not engine_python:
        try:
            return importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            return None
    with TemporaryDirectory(prefix="cog-triton-") as links:
        try:
            done = subprocess.run(
                [engine_python, "-c", _PRINT_VERSION],
                env=isolated_python.environment(Path(links)),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return done.stdout.strip() or None


def require_tested(version: str, *, allow_untested: bool) -> str | None:
    """Raise E1305 for a version that was never run, or return a warning if that is allowed."""
    tested = [row["minor"] for row in known_versions()]
    if minor_version(version) in tested:
        return None
    rule = f"this cog-triton was run with vLLM {' and '.join(tested)} only (docs/vllm.md)"
    if allow_untested:
        return f"{UNTESTED} is set, so vLLM {version} is served: {rule}"
    raise EngineIncompatible(
        f"vLLM {version}: {rule}; install it, or set {UNTESTED}=1 to try this one"
    )
