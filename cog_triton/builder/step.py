"""Step runner: a subprocess with live output and a timeout, of which no process is left behind."""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from cog_triton.builder.plan import Step
from cog_triton.builder.workspace import Echo
from cog_triton.errors import (
    BuildCancelled,
    BuildStepFailed,
    BuildStepTimeout,
    DiskFull,
    FrameworkError,
    from_text,
)
from cog_triton.system import isolated_python, reaper
from cog_triton.system.terminal_progress import duration

_GRACE_S = 5.0
_POLL_S = 1.0
_LEAST_FREE = 1 << 20
# The last is numpy's.
_NO_SPACE = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "Not enough free space")
LAST_LINES = 40
LONGEST = 8192
"""Characters of a line; the rest of a longer one becomes further lines."""
_REDRAW_S = 5.0
_REDACTED = "***"
_TRACE = "Traceback (most recent call last):"
# What argparse, and many a command, write after their usage.
_REFUSAL = re.compile(r"[\w./-]+: error: ")
_MOST_LINES = 5


def run_step(
    step: Step,
    cwd: Path,
    log: Path,
    echo: Echo,
    secrets: Mapping[str, str] = MappingProxyType({}),
) -> OutputStream:
    """Run the process of one step to its end, away from our terminal, and ended with us.

    Its output goes to `echo` line by line, prefixed, and to the file `log`.

    Args:
        cwd: where it runs.
        secrets: further variables of its environment, whose values are redacted in its output.

    Raises:
        UserError: the script refused its input with a coded error.
        BuildStepTimeout: it ran longer than `timeout`; its processes are gone.
        DiskFull: it failed, and its last lines say that no space or quota was left, or none is.
        BuildStepFailed: any other failure, with exit code and cause.
        BuildCancelled: the build was interrupted; the step's processes are gone.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    stream = OutputStream(step.name, log, echo, [*secrets.values()])
    began = time.monotonic()
    status = _run_to_end(step, cwd, stream, secrets)
    if stream.failure is not None:
        raise stream.failure
    if status != 0:
        refused = from_text(stream.last[-1]) if stream.last else None
        if refused is not None:
            raise type(refused)(f"[{step.name}] {refused.detail}")
        failed: type[FrameworkError] = BuildStepFailed
        full = ""
        if any(text in line for text in _NO_SPACE for line in stream.last):
            failed = DiskFull
        elif place := _full_disk(step, cwd):
            failed, full = DiskFull, f", and no space is left in {place}"
        raise failed(f"step {step.name} ended with exit code {status}{full}{stream.end}")
    echo(f"[{step.name}] done in {duration(time.monotonic() - began)}")
    return stream


def _run_to_end(step: Step, cwd: Path, stream: OutputStream, secrets: Mapping[str, str]) -> int:
    """Run the step; its exit code (128 + n for signal n). No process of it is left in any case."""
    limits = _wait_limits(step, stream)
    ours = isolated_python.environment_of(step.script.python, cwd)
    process = reaper.spawn(
        step.argv,
        grace=_GRACE_S,
        cwd=cwd,
        env={**ours, **step.env, **secrets},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.process.stdout is not None
    lines = io.TextIOWrapper(process.process.stdout, "utf-8", errors="replace", newline="")
    thread = threading.Thread(target=stream.run, args=(lines,), daemon=True)
    try:
        thread.start()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(next(limits))
    except KeyboardInterrupt:
        raise BuildCancelled(f"stopped during step {step.name}") from None
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
        thread.join()


def _wait_limits(step: Step, stream: OutputStream) -> Iterator[float]:
    """Seconds to wait for the step, time after time.

    Raises:
        BuildStepTimeout: the step has run for its `timeout`.
    """
    began = time.monotonic()
    while True:
        passed = time.monotonic() - began
        left = float("inf") if step.timeout is None else step.timeout - passed
        if left <= 0:
            raise BuildStepTimeout(
                f"step {step.name} ran longer than its timeout of {step.timeout:g} s and was"
                f" stopped{stream.end}"
            )
        yield min(_POLL_S, left)
        if stream.failure is not None:
            raise stream.failure


def _full_disk(step: Step, cwd: Path) -> Path | None:
    """Where a step writes and nothing more fits. Short writes and a SIGBUS do not say so."""
    temporary = Path(step.env.get("TMPDIR", tempfile.gettempdir()))
    for place in (cwd, temporary):
        if place.is_dir() and shutil.disk_usage(place).free < _LEAST_FREE:
            return place
    return None


class OutputStream:
    """Reader of a step's output: to `echo`, prefixed by the step's `name`, and to the file `log`.

    `secrets` are redacted in both. `run` is for a thread of its own.
    """

    def __init__(self, name: str, log: Path, echo: Echo, secrets: Sequence[str]) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        """The last lines, without their ends."""
        self.failure: BaseException | None = None
        """Why `run` ended before its source did."""
        self.log = log
        self._name, self._echo = name, echo
        self._secrets = [secret for secret in secrets if secret]

    @property
    def end(self) -> str:
        """End of an error's text: where the output is, and last the lines that name the cause."""
        return "\n".join([f" (its output: {self.log}):", *cause(self.last)])

    def run(self, source: io.TextIOWrapper) -> None:
        """Read until `source` ends or a `failure`, after which the step's next write ends it."""
        try:
            with source, self.log.open("w", encoding="utf-8") as file:
                self._run(source, file)
        except BaseException as error:  # noqa: BLE001  # it is raised in `run_step`
            self.failure = error

    def _run(self, source: io.TextIOWrapper, file: io.TextIOWrapper) -> None:
        """Of a line that is redrawn, as progress bars are, few states are echoed."""
        redrawn, echoed_at = False, 0.0
        for line in self._redacted(source):
            file.write(line)
            file.flush()
            if redrawn and self.last:
                self.last.pop()
            redrawn = line.endswith("\r")
            self.last.append(line.rstrip("\r\n"))
            if not redrawn or time.monotonic() - echoed_at >= _REDRAW_S:
                echoed_at = time.monotonic()
                self._echo(f"[{self._name}] {self.last[-1]}")

    def _redacted(self, source: io.TextIOWrapper) -> Iterator[str]:
        """Lines, long ones in pieces, none of which ends within a secret."""
        held = max(map(len, self._secrets), default=1) - 1
        kept = ""
        while piece := source.readline(LONGEST):
            line = kept + piece
            for secret in self._secrets:
                line = line.replace(secret, _REDACTED)
            is_whole = len(piece) < LONGEST or piece.endswith(("\n", "\r"))
            cut = len(line) if is_whole else max(0, len(line) - held)
            kept = line[cut:]
            if cut:
                yield line[:cut]
        if kept:
            yield kept


def written(step: Step, root: Path) -> str:
    """The directory with the files of `step`, which wrote all that there is below `root`.

    It is `output_dir`, or the only directory below it that has files, as ``c-model/gpt2/1-gpu``;
    or the only such one below another directory that the arguments name.

    Raises:
        BuildStepFailed: there is none, or more than one; names them.
    """
    found = _having_files(root / step.output_dir)
    if len(found) > 1:
        raise BuildStepFailed(
            f"step {step.name} wrote more than one directory below {step.output_dir}:"
            f" {', '.join(str(path.relative_to(root)) for path in found)}; output_dir must name one"
        )
    named = {root / value for value in step.args.values() if isinstance(value, str) and value}
    inside = [place for place in named if place.resolve().is_relative_to(root) and place != root]
    others = sorted({path for place in inside for path in _having_files(place)})
    if found or len(others) == 1:
        return (found or others)[0].relative_to(root).as_posix()
    names = ", ".join(str(path.relative_to(root)) for path in others)
    raise BuildStepFailed(
        f"step {step.name} ended well but wrote nothing into {step.output_dir}"
        f"{f'; it wrote {names}' if names else ''}: does output_dir say where the script writes?"
    )


def _having_files(root: Path) -> list[Path]:
    """The topmost directories at or below `root` that have files in them."""
    if not root.is_dir() or root.is_symlink():
        return []
    if any(path.is_file() for path in root.iterdir()):
        return [root]
    return [found for path in sorted(root.iterdir()) for found in _having_files(path)]


def cause(lines: Sequence[str]) -> list[str]:
    """The last lines that name the cause of a failure: an exception, a refusal, or all there is.

    All of the output was echoed as it came and is in the step's log, so it is not said again.

    Args:
        lines: the last lines of the step's output, as `OutputStream.last`.
    """
    told = [line for line in lines if line.strip()]
    for index, line in reversed(list(enumerate(told))):
        if _REFUSAL.match(line):
            return told[index : index + _MOST_LINES]
        if line.rstrip().endswith(_TRACE):
            # The frames are indented below it, and the exception is not.
            margin = line[: line.index(_TRACE)]
            after = [text.removeprefix(margin) for text in told[index + 1 :]]
            raised = next((n for n, text in enumerate(after) if not text[:1].isspace()), None)
            if raised is not None:
                return after[raised:][:_MOST_LINES]
    return told[-_MOST_LINES:]
