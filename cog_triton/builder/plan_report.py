"""What a build would do, as text to read and to copy from."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from cog_triton.builder import model, step_cache
from cog_triton.builder.plan import Plan, Step
from cog_triton.builder.workspace import Workspace
from cog_triton.download import model_source
from cog_triton.download.model_request import FetchedModel
from cog_triton.errors import ModelUnavailable


def as_lines(plan: Plan, workspace: Workspace, output: Path) -> Iterator[str]:
    """The model, the directories, the disk space and every step of `plan`.

    Nothing is written. Only what is one word, as a path, is ever wider than 80 columns.
    """
    config = plan.config
    others = workspace.others(plan.work_dir)
    fingerprints: Sequence[str | None] = [None] * len(plan.steps)
    yield f"model     {config.model_id}"
    here = download = None
    try:
        here = model_source.locate(model.request_of(config), workspace.models)
        download = model_source.size(model.request_of(config), workspace.models)
    except ModelUnavailable as error:
        yield f"          NOT HERE: {error}"
    else:
        if here is not None:
            fingerprints = step_cache.of_steps(plan, here.path)
        size = "of a size that could not be asked for" if download is None else _gb(download)
        yield f"          {here.path if here else f'to be downloaded, {size}'}"
    states = [_state(*pair, others) for pair in zip(plan.steps, fingerprints, strict=True)]
    yield f"work dir  {plan.work_dir}"
    yield f"          {_disk(plan, here, download, states)}"
    yield f"engine    {output}"
    for step, state in zip(plan.steps, states, strict=True):
        yield ""
        yield f"{step.name:<8}  {state}"
        yield f"  reads   {_relative(step.input, plan)}"
        yield f"  writes  {_relative(step.output_dir, plan)}"
        yield from (f"  {line}" for line in _command(step))


def _disk(plan: Plan, here: FetchedModel | None, download: int | None, states: list[str]) -> str:
    """Free and needed: a step that runs, and the tar, take roughly as much as the model."""
    free = f"{_gb(shutil.disk_usage(_existing(plan.work_dir)).free)} free"
    size = model.size_of(here.path) if here else download
    if size is None:
        return f"{free}; how much is needed is not known"
    parts = sum(not state.startswith("cached") for state in states) + 1
    needed = (0 if here else size) + parts * size
    return f"{free}, about {_gb(needed)} needed"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _state(step: Step, fingerprint: str | None, others: Sequence[Path]) -> str:
    if fingerprint and step_cache.finished(step, fingerprint):
        return "cached: is not run again"
    if fingerprint and step_cache.elsewhere(step, fingerprint, others):
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
