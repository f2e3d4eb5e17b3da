"""Option probe: reads the options of a build script from the script itself, without its work."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cog_triton.builder import step_python
from cog_triton.builder.options import argparse_shim
from cog_triton.builder.options.recorded import Option, Options, Unreadable
from cog_triton.system import reaper

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
        env = {**step_python.environment_of(python, scratch), "TMPDIR": str(scratch / "tmp")}
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
