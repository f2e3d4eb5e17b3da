"""Option probe: reads the options of a build script from the script itself, without its work."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cog_triton.builder import script_environment
from cog_triton.builder.options import argparse_shim
from cog_triton.builder.options.help_text import options_of
from cog_triton.builder.options.option_types import Option, Options, Unreadable
from cog_triton.system import reaper

LIMIT_S = 120.0
"""Time limit of a script's imports; TensorRT-LLM's own take 15 s on an idle machine."""
_MAX_OUTPUT_BYTES = 1 << 20


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
        env = {**script_environment.environment_of(python, scratch), "TMPDIR": str(scratch / "tmp")}
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
