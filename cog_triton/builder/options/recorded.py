"""Options of build scripts, and those of TensorRT-LLM's as recorded, for machines that lack it.

The data is in ``data``, one JSON file a script, written by ``scripts/read-options``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

if TYPE_CHECKING:
    from importlib.abc import Traversable

_SUFFIX = ".json"


@dataclass(frozen=True)
class Option:
    """One option; `nargs`, `required` and `default` as in argparse, 0 being a bare flag."""

    names: tuple[str, ...]
    """Its long names without dashes, as a config writes them; empty if it has none."""
    label: str
    """What to call it if it has no name."""
    nargs: int | str | None = None
    type: str | None = None
    """``str``, ``int`` or ``float``, None for argparse's default; anything else is the script's
    own, and only the script can say what it accepts."""
    choices: tuple[str, ...] | None = None
    required: bool = False
    default: str | None = None


@dataclass(frozen=True)
class Options:
    """All that a script accepts.

    `complete` is false if it also takes, and passes on or drops, what is not here;
    `abbreviations` if it takes the unique beginning of a name for the name.
    """

    options: tuple[Option, ...]
    positionals: tuple[Option, ...] = ()
    complete: bool = True
    abbreviations: bool = False


@dataclass(frozen=True)
class Unreadable:
    """Why a script's options are not known."""

    reason: str


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
