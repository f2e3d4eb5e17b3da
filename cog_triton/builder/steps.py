"""Step runner: a subprocess with live output and a timeout, of which no process is left behind."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from cog_triton.builder import output_directory, script_environment
from cog_triton.builder.output_stream import Echo, OutputStream
from cog_triton.builder.plan import Step
from cog_triton.builder.step_failure import cause
from cog_triton.errors import (
    BuildCancelled,
    BuildStepFailed,
    BuildStepTimeout,
    DiskFull,
    FrameworkError,
    InvalidArgument,
    from_text,
)
from cog_triton.system import reaper
from cog_triton.system.terminal_progress import duration

_GRACE_S = 5.0
_POLL_S = 1.0
_LEAST_FREE = 1 << 20
# The last is numpy's.
_NO_SPACE = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "Not enough free space")


def run_step(
    step: Step, log_dir: Path, echo: Echo, secrets: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Run one step to its end, away from our terminal and ended with us (see `reaper`).

    Its output goes to `echo` line by line, prefixed, and to ``<log_dir>/<step>.log``.

    Args:
        secrets: further variables of its environment, whose values are redacted in its output.

    Returns:
        The directory that it wrote: `output_dir`, or where `output_directory.written` finds it.

    Raises:
        UserError: the script refused its input with a coded error.
        BuildStepTimeout: it ran longer than `timeout`; its processes are gone.
        DiskFull: it failed, and its last lines say that no space or quota was left, or none is.
        BuildStepFailed: any other failure, with exit code and cause (see `step_failure`).
        BuildCancelled: the build was interrupted; the step's processes are gone.
    """
    if step.output_dir.is_symlink() or step.output_dir.is_file():
        raise InvalidArgument(f"{step.name}: output_dir {step.output_dir} is no directory")
    if step.output_dir.exists():
        shutil.rmtree(step.output_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    stream = OutputStream(step.name, log_dir / f"{step.name}.log", echo, [*secrets.values()])
    began, since_ns = time.monotonic(), _file_time(log_dir)
    status = _run_to_end(step, stream, secrets)
    if stream.failure is not None:
        raise stream.failure
    if status != 0:
        refused = from_text(stream.last[-1]) if stream.last else None
        if refused is not None:
            raise type(refused)(f"[{step.name}] {refused.detail}")
        failed: type[FrameworkError] = BuildStepFailed
        full = ""
        if any(text in stream.text for text in _NO_SPACE):
            failed = DiskFull
        elif place := _full_disk(step):
            failed, full = DiskFull, f", and no space is left in {place}"
        raise failed(f"step {step.name} ended with exit code {status}{full}{_cause(stream)}")
    try:
        written = output_directory.written(step, since_ns)
    except BuildStepFailed as error:
        raise BuildStepFailed(f"{error.detail}{_cause(stream)}") from None
    echo(f"[{step.name}] done in {duration(time.monotonic() - began)}")
    return written


def _run_to_end(step: Step, stream: OutputStream, secrets: Mapping[str, str]) -> int:
    """Run the step; its exit code (128 + n for signal n). No process of it is left in any case."""
    limits = _wait_limits(step, stream)
    ours = script_environment.environment_of(step.script.python, step.cwd)
    process = reaper.spawn(
        step.argv,
        grace=_GRACE_S,
        cwd=step.cwd,
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
                f" stopped{_cause(stream)}"
            )
        yield min(_POLL_S, left)
        if stream.failure is not None:
            raise stream.failure


def _cause(stream: OutputStream) -> str:
    """End of an error's text: where the whole output is, and last the lines that tell the cause."""
    return "\n".join([f" (its output: {stream.log}):", *cause(stream.last)])


def _full_disk(step: Step) -> Path | None:
    """Where a step writes and nothing more fits. Short writes and a SIGBUS do not say so."""
    temporary = Path(step.env.get("TMPDIR", tempfile.gettempdir()))
    for place in (step.output_dir, step.cwd, temporary):
        if place.is_dir() and shutil.disk_usage(place).free < _LEAST_FREE:
            return place
    return None


def _file_time(directory: Path) -> int:
    """Time now in ns by the file system of `directory`, whose clock is a little behind."""
    probe = directory / ".now"
    probe.touch()
    try:
        os.utime(probe)
        return probe.stat().st_mtime_ns
    finally:
        probe.unlink()
