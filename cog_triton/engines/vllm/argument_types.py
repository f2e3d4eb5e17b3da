"""vLLM's version, whether it was ever run, and names and types of its arguments.

``scripts/record_vllm.py`` writes ``argument_types_*.json``, the one record, from vLLM's source.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cog_triton.errors import EngineIncompatible
from cog_triton.system import isolated_python
from cog_triton.text import client_json

Kinds = Sequence[str]

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "an object",
    "null": "null",
}


@dataclass(frozen=True, slots=True)
class ArgumentTypes:
    """Argument types of vLLM `version`.

    `record` has the types of each argument by section and name; with `exact` it is of the same
    minor version, so that names that are not in it do not exist.
    """

    version: str
    record: Mapping[str, Any]
    exact: bool = True

    @property
    def title(self) -> str:
        """The version as messages name it."""
        if self.exact:
            return f"vLLM {self.version}"
        return f"vLLM {self.record['source']['version']}, whose record {self.version} goes by,"

    @property
    def engine_args(self) -> Mapping[str, Kinds]:
        """The arguments of AsyncEngineArgs."""
        return self.record["engine_args"]  # type: ignore[no-any-return]

    @property
    def sampling_params(self) -> Mapping[str, Kinds]:
        """The fields of SamplingParams."""
        return self.record["sampling_params"]  # type: ignore[no-any-return]


@cache
def _record() -> Mapping[str, Any]:
    (path,) = Path(__file__).parent.glob("argument_types_*.json")
    return json.loads(path.read_text("utf-8"))  # type: ignore[no-any-return]


def types_of(version: str | None = None) -> ArgumentTypes:
    """Argument types of a version, by default the recorded one, which stands in for all others."""
    recorded = _record()["source"]["version"]
    exact = version is None or minor_version(version) == minor_version(recorded)
    return ArgumentTypes(version or recorded, _record(), exact)


def minor_version(version: str) -> str:
    """``0.33`` for ``0.33.1+cu130``."""
    return ".".join(re.findall(r"\d+", version.partition("+")[0])[:2])


def convert(value: Any, kinds: Kinds) -> Any:
    """Convert `value` to one of `kinds`; raises ValueError with the rule that it breaks.

    Text is parsed where only numbers, booleans, lists or objects are allowed: clients of Triton's
    vllm_backend send all of them as text.
    """
    if isinstance(value, str) and "str" not in kinds:
        value = _parse(value, kinds)
    if not kinds or any(_is(value, kind) for kind in kinds):
        converts = type(value) is int and "float" in kinds and "int" not in kinds
        return float(value) if converts else value
    choices = [kind[1:] for kind in kinds if kind.startswith("=")]
    words = [word for kind, word in _WORDS.items() if kind in kinds and kind != "null"]
    null = ["null"] if "null" in kinds else []
    raise ValueError("must be " + " or ".join([*words, *choices, *null]))


def _parse(text: str, kinds: Kinds) -> Any:
    if f"={text}" in kinds:
        return text
    try:
        return client_json.parse(text.lower() if "bool" in kinds else text)
    except ValueError:
        return text


def _is(value: Any, kind: str) -> bool:
    if kind.startswith("="):
        return not isinstance(value, bool) and str(value) == kind[1:]
    if isinstance(value, bool):
        return kind == "bool"
    types: dict[str, Any] = {
        "int": int,
        "float": (int, float),
        "str": str,
        "list": list,
        "dict": dict,
        "null": type(None),
    }
    return kind == "any" or (kind in types and isinstance(value, types[kind]))


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
    """Version of the vLLM that a Python has, by package metadata; None if it is not known.

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
