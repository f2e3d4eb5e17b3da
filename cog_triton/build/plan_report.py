"""What a build would do, as text to read and to copy from."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from cog_triton import model_source
from cog_triton.build import stamps
from cog_triton.build.config import BuildConfig
from cog_triton.build.plan import Plan, Step
from cog_triton.errors import ModelUnavailable


def as_lines(config: BuildConfig, plan: Plan, output: Path) -> Iterator[str]:
    """The model, the directories and every step of `plan`, which is `config`'s.

    Nothing is written. Only what is one word, as a path, is ever wider than 80 columns.
    """
    yield f"model     {config.model_id}"
    fingerprint = None
    try:
        model = model_source.resolve(config.model_id)
        fingerprint = stamps.of_source(model)
        yield f"          {model}"
    except ModelUnavailable as error:
        yield f"          NOT HERE: {error}"
    yield f"work dir  {plan.work_dir}"
    yield f"          {shutil.disk_usage(_existing(plan.work_dir)).free / 1e9:.1f} GB free"
    yield f"engine    {output}"
    for step in plan.steps:
        finished = False
        if fingerprint is not None:
            fingerprint = stamps.of_step(step, fingerprint)
            finished = stamps.is_finished(step, fingerprint)
        yield ""
        yield f"{step.name:<8}  {'cached: is not run again' if finished else 'to run'}"
        yield f"  reads   {_relative(step.input, plan)}"
        yield f"  writes  {_relative(step.output_dir, plan)}"
        yield from (f"  {line}" for line in _command(step))


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that is there."""
    return next(place for place in (path, *path.parents) if place.is_dir())


def _relative(path: Path, plan: Plan) -> str:
    return str(path.relative_to(plan.work_dir))


def _command(step: Step) -> Iterator[str]:
    """The command line quoted for a shell, an option and its values on each line."""
    lines: list[list[str]] = [[]]
    for index, word in enumerate(step.argv):
        if index > 0 and (index == 1 or word.startswith("--")):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    for index, line in enumerate(lines):
        end = " \\" if index < len(lines) - 1 else ""
        yield f"{'$ ' if index == 0 else '    '}{' '.join(line)}{end}"
