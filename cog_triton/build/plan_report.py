"""What a build would do, as text to read and to copy from."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from cog_triton import model_source
from cog_triton.build import stamps
from cog_triton.build.plan import Plan, Step
from cog_triton.errors import ModelUnavailable


def as_lines(plan: Plan, output: Path, others: Sequence[Path] = ()) -> Iterator[str]:
    """The model, the directories and every step of `plan`.

    Nothing is written. Only what is one word, as a path, is ever wider than 80 columns.

    Args:
        others: work directories of other builds, where a step may have finished already.
    """
    yield f"model     {plan.config.model_id}"
    fingerprints: Sequence[str | None] = [None] * len(plan.steps)
    try:
        model = model_source.resolve(plan.config.model_id)
        fingerprints = stamps.of_steps(plan, model)
        yield f"          {model}"
    except ModelUnavailable as error:
        yield f"          NOT HERE: {error}"
    yield f"work dir  {plan.work_dir}"
    yield f"          {shutil.disk_usage(_existing(plan.work_dir)).free / 1e9:.1f} GB free"
    yield f"engine    {output}"
    for step, fingerprint in zip(plan.steps, fingerprints, strict=True):
        yield ""
        yield f"{step.name:<8}  {_state(step, fingerprint, others)}"
        yield f"  reads   {_relative(step.input, plan)}"
        yield f"  writes  {_relative(step.output_dir, plan)}"
        yield from (f"  {line}" for line in _command(step))


def _state(step: Step, fingerprint: str | None, others: Sequence[Path]) -> str:
    if fingerprint and stamps.finished(step, fingerprint):
        return "cached: is not run again"
    if fingerprint and stamps.elsewhere(step, fingerprint, others):
        return "cached by another build: is not run again"
    return "to run" if step.script.here else f"CANNOT RUN: {step.script.problem}"


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that is there."""
    return next(place for place in (path, *path.parents) if place.is_dir())


def _relative(path: Path, plan: Plan) -> str:
    return str(path.relative_to(plan.work_dir))


def _command(step: Step) -> Iterator[str]:
    """The command line quoted for a shell, an option and its values on each line."""
    lines: list[list[str]] = [[f"{key}={shlex.quote(text)}" for key, text in step.env.items()]]
    for index, word in enumerate(step.argv):
        if 0 < index < len(step.script.argv) or word.startswith("--"):
            lines.append([])
        # Its variable is for the reader's shell to expand.
        is_absent = word.startswith("$TRTLLM_DIR/") and index < len(step.script.argv)
        lines[-1].append(word if is_absent else shlex.quote(word))
    for index, line in enumerate(lines):
        end = " \\" if index < len(lines) - 1 else ""
        yield f"{'$ ' if index == 0 else '    '}{' '.join(line)}{end}"
