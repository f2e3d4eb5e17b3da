"""Run a build: each step a subprocess that leaves nothing behind, finished steps not redone."""

from __future__ import annotations

import collections
import contextlib
import io
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from cog_triton import model_source, reaper
from cog_triton.build import environment, package, stamps
from cog_triton.build.check import check_arguments
from cog_triton.build.config import BuildConfig
from cog_triton.build.plan import EXAMPLES, Step, make_plan
from cog_triton.errors import (
    BuildCancelled,
    BuildStepFailed,
    InvalidArgument,
    from_text,
)

Echo = Callable[[str], None]
LAST_LINES = 40
_GRACE_S = 5.0


def run_build(
    config: BuildConfig, work_dir: Path, output: Path, *, echo: Echo, examples: Path = EXAMPLES
) -> Path:
    """Build `config` in `work_dir` and write the engine to `output`.

    Args:
        work_dir: made if missing; a later run with the same config skips finished steps.
        output: the engine.tar to write; it appears complete or not at all.
        echo: gets every line of progress, without newline.
        examples: directory of ``<family>/<script>.py``.

    Returns:
        `output`.

    Raises:
        UserError: E1300-E1306, as the config, its arguments, the model or a script finds.
        BuildStepFailed: a step ended with an error of its own.
        BuildCancelled: KeyboardInterrupt or SIGTERM; the step's processes are gone.
    """
    plan = make_plan(config, work_dir, examples)
    with cancellable():
        check_arguments(config, plan, echo)
    model = model_source.resolve(config.model_id)
    plan.work_dir.mkdir(parents=True, exist_ok=True)
    with cancellable(), stamps.locked(plan.work_dir):
        echo(f"[model] {config.model_id}: {model}")
        _point_at(plan.model, model)
        before = stamps.of_source(model)
        for step in plan.steps:
            wanted = stamps.of_step(step, before)
            if stamps.is_finished(step, wanted):
                echo(f"[{step.name}] already done")
            else:
                stamps.forget(step)
                run_step(step, plan.work_dir / "logs", echo)
                stamps.remember(step, wanted)
            before = wanted
        echo(f"[package] {output}")
        package.write(config, plan.engine_dir, plan.work_dir / "package", output)
    return output


def run_step(step: Step, log_dir: Path, echo: Echo) -> None:
    """Run one step to its end, apart from our terminal and tied to our life (`reaper`).

    Its output goes to `echo` line by line, prefixed, and to ``<log_dir>/<step>.log``.

    Raises:
        UserError: the script refused its input with a coded error.
        BuildStepFailed: any other failure, with exit code and last lines.
        BuildCancelled: the build was interrupted; the step's processes are gone.
    """
    if step.output_dir.is_symlink() or step.output_dir.is_file():
        raise InvalidArgument(f"{step.name}: output_dir {step.output_dir} is no directory")
    if step.output_dir.exists():
        shutil.rmtree(step.output_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    status = _run_to_end(step, log_dir / f"{step.name}.log", last, echo)
    text = "\n".join(last)
    if status != 0:
        refused = from_text(last[-1]) if last else None
        if refused is not None:
            raise type(refused)(f"[{step.name}] {refused.detail}")
        raise BuildStepFailed(f"step {step.name} ended with exit code {status}:\n{text}")
    if not step.output_dir.is_dir():
        raise BuildStepFailed(
            f"step {step.name} ended well but wrote no {step.output_dir}; "
            f"does output_dir say where the script writes?\n{text}"
        )


def _run_to_end(step: Step, log: Path, last: collections.deque[str], echo: Echo) -> int:
    """The exit code (128 + n for signal n); no process of the step is left, whatever happens."""
    step_process = reaper.spawn(
        step.argv,
        grace=_GRACE_S,
        cwd=step.cwd,
        env=environment.of_scripts(step.argv[0], step.cwd),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    relay = threading.Thread(
        target=_relay, args=(step_process, step.name, log, last, echo), daemon=True
    )
    try:
        relay.start()
        return step_process.wait()
    except KeyboardInterrupt:
        raise BuildCancelled(f"stopped during step {step.name}") from None
    finally:
        if step_process.poll() is None:
            step_process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                step_process.wait(_GRACE_S)
            step_process.kill()
        relay.join()


def _relay(
    source: reaper.Reaped, name: str, log: Path, last: collections.deque[str], echo: Echo
) -> None:
    assert source.process.stdout is not None
    lines = io.TextIOWrapper(source.process.stdout, "utf-8", errors="replace")
    with log.open("w", encoding="utf-8") as file, lines:
        for line in lines:
            last.append(line.rstrip("\n"))
            file.write(line)
            file.flush()
            echo(f"[{name}] {last[-1]}")


def _point_at(link: Path, model: Path) -> None:
    """Make `link` name the model; nothing is copied."""
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise InvalidArgument(f"work_dir: {link} is there and is not this build's link")
    link.symlink_to(model)


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
