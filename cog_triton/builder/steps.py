"""Run one step: a subprocess that leaves nothing behind, whose output is seen while it runs."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType

from cog_triton.builder import output_directory, script_environment
from cog_triton.builder.output_stream import Echo, Relay
from cog_triton.builder.plan import Step
from cog_triton.errors import (
    BuildCancelled,
    BuildStepFailed,
    BuildStepTimeout,
    DiskFull,
    InvalidArgument,
    from_text,
)
from cog_triton.system import reaper

_GRACE_S = 5.0
_SILENCE_S = 60.0


def run_step(
    step: Step, log_dir: Path, echo: Echo, secrets: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Run one step to its end, apart from our terminal and tied to our life (`reaper`).

    Its output goes to `echo` line by line, prefixed, and to ``<log_dir>/<step>.log``.

    Args:
        secrets: further variables of its environment, whose values are blotted out wherever
            its output shows them.

    Returns:
        The directory that it wrote: `output_dir`, or where `outputs.written` finds it.

    Raises:
        UserError: the script refused its input with a coded error.
        BuildStepTimeout: it ran longer than `timeout`; its processes are gone.
        DiskFull: it failed and its last lines say that no space was left.
        BuildStepFailed: any other failure, with exit code and last lines.
        BuildCancelled: the build was interrupted; the step's processes are gone.
    """
    if step.output_dir.is_symlink() or step.output_dir.is_file():
        raise InvalidArgument(f"{step.name}: output_dir {step.output_dir} is no directory")
    if step.output_dir.exists():
        shutil.rmtree(step.output_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    relay = Relay(step.name, log_dir / f"{step.name}.log", echo, [*secrets.values()])
    began, since_ns = time.monotonic(), _clock_of(log_dir)
    status = _run_to_end(step, relay, secrets)
    if relay.failure is not None:
        raise relay.failure
    if status != 0:
        refused = from_text(relay.last[-1]) if relay.last else None
        if refused is not None:
            raise type(refused)(f"[{step.name}] {refused.detail}")
        failed = DiskFull if os.strerror(errno.ENOSPC) in relay.text else BuildStepFailed
        raise failed(f"step {step.name} ended with exit code {status}:\n{relay.text}")
    try:
        written = output_directory.written(step, since_ns)
    except BuildStepFailed as error:
        raise BuildStepFailed(f"{error.detail}\n{relay.text}") from None
    echo(f"[{step.name}] done in {_duration(time.monotonic() - began)}")
    return written


def _run_to_end(step: Step, relay: Relay, secrets: Mapping[str, str]) -> int:
    """The exit code (128 + n for signal n); no process of the step is left, whatever happens."""
    ours = script_environment.of_scripts(step.script.python, step.cwd)
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
    thread = threading.Thread(target=relay.run, args=(lines,), daemon=True)
    try:
        thread.start()
        return _wait(step, process, relay)
    except KeyboardInterrupt:
        raise BuildCancelled(f"stopped during step {step.name}") from None
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
        thread.join()


def _wait(step: Step, process: reaper.Reaped, relay: Relay) -> int:
    began = time.monotonic()
    while True:
        passed = time.monotonic() - began
        left = float("inf") if step.timeout is None else step.timeout - passed
        if left <= 0:
            raise BuildStepTimeout(
                f"step {step.name} ran longer than its timeout of {step.timeout:g} s and was"
                f" stopped:\n{relay.text}"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(_SILENCE_S, left))
        if relay.failure is not None:
            raise relay.failure
        silence = time.monotonic() - relay.heard
        if silence >= _SILENCE_S:
            relay.tell(
                f"... running for {_duration(time.monotonic() - began)}, silent for"
                f" {_duration(silence)}"
            )


def _clock_of(directory: Path) -> int:
    """Now, in ns, as files made here from now on have it; file systems are a little behind."""
    probe = directory / ".now"
    probe.touch()
    try:
        os.utime(probe)
        return probe.stat().st_mtime_ns
    finally:
        probe.unlink()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{n} {unit}" for n, unit in parts if n) or f"{seconds:.1f} s"


@contextlib.contextmanager
def cancellable() -> Iterator[None]:
    """SIGTERM as KeyboardInterrupt, and both as BuildCancelled; may be nested."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        raise BuildCancelled("the build was interrupted") from None
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
