"""Options of build scripts: probed, without a script's work, or as recorded of TensorRT-LLM's.

What is recorded is for machines that lack it, in ``data``, one JSON file a script, which
``scripts/read-options`` writes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from cog_triton.builder.options import argparse_shim
from cog_triton.system import isolated_python, reaper

if TYPE_CHECKING:
    from importlib.abc import Traversable

_SUFFIX = ".json"
LIMIT_S = 120.0
"""Time limit of a script's imports; TensorRT-LLM's own take 15 s on an idle machine."""
_MAX_OUTPUT_BYTES = 1 << 20
_BOX = re.compile(r"[│┃|]\s?\*?(.*?)[│┃|]?")
_NAME = r"-{1,2}[A-Za-z][\w-]*"
_VALUE = r"[= ](?:\[[^\]]*\]|\{[^}]*\}|<[^>]*>|[A-Z][A-Z0-9_:.]*(?:\.\.\.)?)"
_ENTRY = re.compile(
    rf"\s{{1,8}}({_NAME}(?:{_VALUE})?(?:(?:, ?| ?/ ?|\s+(?=-)){_NAME}(?:{_VALUE})?)*)(.*)"
)
_WIDE_VALUE = re.compile(
    r"\s+(INTEGER|FLOAT|TEXT|PATH|FILE|DIRECTORY|UUID|<[^>]+>|\[[^\]|]+\|[^\]]+\])"
)
_CHOICES = re.compile(r"\{([^}]+)\}|\[([^\]|]+\|[^\]]+)\]")
_TYPES = {"INTEGER": "int", "INT": "int", "<int>": "int", "FLOAT": "float", "<float>": "float"}


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


@contextlib.contextmanager
def probing(
    python: str, script: Path, limit_s: float = LIMIT_S
) -> Iterator[Callable[[], Options | Unreadable]]:
    """Start a probe of `script`; the function that this yields waits for its options.

    The script runs in the interpreter `python` under `argparse_shim`, as far as its command line
    and for at most `limit_s` seconds; afterwards nothing of it is left.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cog-triton-")))
        for name in ("cwd", "tmp"):
            (scratch / name).mkdir()
        out = stack.enter_context((scratch / "out").open("w+b"))
        err = stack.enter_context((scratch / "err").open("w+b"))
        env = {**isolated_python.environment_of(python, scratch), "TMPDIR": str(scratch / "tmp")}
        process = reaper.spawn(
            [python, argparse_shim.__file__, str(script), str(scratch / "result")],
            grace=0,
            cwd=scratch / "cwd",
            env=env,
            stdout=out,
            stderr=err,
        )
        stack.callback(process.kill)

        def wait() -> Options | Unreadable:
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return Unreadable(f"it did not read its command line within {limit_s:g} s")
            result = scratch / "result"
            if result.is_file() and result.stat().st_size:
                return from_argparse(json.loads(result.read_text("utf-8")))
            return _from_output(status, scratch)

        yield wait


def from_argparse(parser: dict[str, Any]) -> Options:
    """Options of `parser`, the JSON that `argparse_shim` writes."""
    options: list[Option] = []
    positionals: list[Option] = []
    for action in parser["actions"]:
        choices = action["choices"]
        option = Option(
            **{
                **action,
                "names": tuple(n[2:] for n in action["names"] if n.startswith("--")),
                "choices": None if choices is None else tuple(choices),
            }
        )
        (options if action["names"] else positionals).append(option)
    return Options(tuple(options), tuple(positionals), parser["complete"], parser["abbreviations"])


def _from_output(status: int, scratch: Path) -> Options | Unreadable:
    if status == 0:
        options = options_of(_text(scratch / "out"))
        if options:
            return Options(tuple(options))
        return Unreadable("it neither reads its command line with argparse nor answers --help")
    messages = _text(scratch / "err").strip().splitlines() or ["it says nothing"]
    return Unreadable(f"it ended with exit code {status} before it read them: {messages[-1]}")


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_OUTPUT_BYTES).decode("utf-8", "replace")


def options_of(text: str) -> list[Option]:
    """The options that a help `text` lists; none if it is no help."""
    if not re.search(r"usage\b", text, re.IGNORECASE):
        return []
    sections: list[tuple[str, str]] = []
    for line in text.splitlines():
        boxed = _BOX.fullmatch(line)
        entry = _ENTRY.fullmatch(" " + boxed[1] if boxed else line)
        if entry:
            sections.append((entry[1], entry[2]))
        elif sections:
            sections[-1] = (sections[-1][0], sections[-1][1] + " " + line.strip(" │┃|"))
    options = [_option(head, rest) for head, rest in sections]
    return [option for option in options if option.names and "help" not in option.names]


def _option(head: str, rest: str) -> Option:
    names = tuple(
        name[2:] for name in re.findall(_NAME, re.sub(_VALUE, "", head)) if name[1] == "-"
    )
    # Rich tables put the value in a column of its own.
    wide = _WIDE_VALUE.match(rest)
    values = [value[1:] for value in re.findall(_VALUE, head)] + ([wide[1]] if wide else [])
    value = values[-1] if values else None
    choices = _CHOICES.fullmatch(value) if value else None
    # Some write <bool> for a flag, others for a value.
    is_optional = value == "<bool>" or ((value or "")[:1] == "[" and not choices)
    return Option(
        names=names,
        label=head,
        nargs=0 if value is None else "*" if is_optional else "+",
        type=_TYPES.get(value or ""),
        choices=tuple(re.split("[,|]", choices[1] or choices[2])) if choices else None,
        required="[required]" in rest,
    )
