"""Recorded options of TensorRT-LLM's scripts, for machines that it is not installed on.

The data is in ``data``, one JSON file a script, written by ``scripts/read-options``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from cog_triton.builder.options.option_types import Options

if TYPE_CHECKING:
    from importlib.abc import Traversable

_SUFFIX = ".json"


@dataclass(frozen=True)
class Source:
    """A file that options were read from."""

    repository: str
    path: str
    commit: str
    version: str | None
    """TensorRT-LLM's own version at that commit; None where it could not be found out."""

    def __str__(self) -> str:
        version = "" if self.version is None else f" ({self.version})"
        return f"{self.repository}@{self.commit[:12]}{version}: {self.path}"


@dataclass(frozen=True)
class Resolved:
    """Names that the script takes its options from, but that another file defines.

    ``--name`` are the choices of that option, which the script does not tell argparse.
    """

    names: tuple[str, ...]
    source: Source


@dataclass(frozen=True)
class KnownOptions:
    """What a script accepted when its source was read."""

    source: Source
    resolved: tuple[Resolved, ...]
    options: Options


def known_scripts() -> tuple[str, ...]:
    """All scripts with known options, sorted, as `known_options` takes them."""
    return tuple(sorted(_data()))


@functools.cache
def known_options(script: str) -> KnownOptions | None:
    """The options of `script`; None if there is no data for it.

    `script` is a path in TensorRT-LLM's ``examples``, as ``quantization/quantize.py``, or the name
    of a command, as ``trtllm-build``.
    """
    file = _data().get(script)
    if file is None:
        return None
    return TypeAdapter(KnownOptions).validate_json(file.read_bytes(), strict=True)


@functools.cache
def _data() -> dict[str, Traversable]:
    return dict(_files(resources.files("cog_triton.builder.options") / "data", ""))


def _files(directory: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in directory.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _files(entry, name + "/")
        elif name.endswith(_SUFFIX):
            yield name.removesuffix(_SUFFIX), entry
