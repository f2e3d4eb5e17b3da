"""Report of a plan: the model, disk space and command lines as text to read and to copy from."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from cog_triton.builder import step_cache
from cog_triton.builder.plan import Plan, Step
from cog_triton.builder.workspace import Workspace, existing
from cog_triton.download import model_source
from cog_triton.errors import ModelUnavailable
from cog_triton.system.redaction import redact_address


def as_lines(plan: Plan, workspace: Workspace, output: Path) -> Iterator[str]:
    """The model, the directories, the disk space and every step of `plan`.

    Nothing is written. Only what is one word, as a path, is ever wider than 80 columns.
    """
    others = workspace.others(plan.work_dir)
    yield f"model     {plan.config.model_id}"
    download = None
    try:
        plan = step_cache.located(plan, workspace.models)
        download = model_source.size(plan.request, workspace.models)
        size = "of a size that could not be asked for" if download is None else _gb(download)
        yield f"          {plan.here.path if plan.here else f'to be downloaded, {size}'}"
    except ModelUnavailable as error:
        yield f"          NOT HERE: {error}"
    for name, adapter in plan.config.lora_adapters.items():
        at = adapter.revision or adapter.sha256
        yield f"lora      {name}: {redact_address(adapter.source)}{f' at {at}' if at else ''}"
    states = [_state(step, others) for step in plan.steps]
    yield f"work dir  {plan.work_dir}"
    yield f"          {_disk(plan, download, states)}"
    yield f"engine    {output}"
    for step, state in zip(plan.steps, states, strict=True):
        yield ""
        yield f"{step.name:<8}  {state}"
        yield f"  reads   {_relative(step.input, plan)}"
        yield f"  writes  {_relative(step.output_dir, plan)}"
        yield from (f"  {line}" for line in _command(step))


def _disk(plan: Plan, download: int | None, states: list[str]) -> str:
    """Free and needed: a step that runs, and the tar, take roughly as much as the model."""
    free = f"{_gb(shutil.disk_usage(existing(plan.work_dir)).free)} free"
    size = _size(plan.here.path) if plan.here else download
    if size is None:
        return f"{free}; how much is needed is not known"
    parts = sum(not state.startswith("cached") for state in states) + 1
    needed = (0 if plan.here else size) + parts * size
    return f"{free}, about {_gb(needed)} needed"


def _size(model: Path) -> int:
    files = [path for path in model.rglob("*") if path.is_file()] if model.is_dir() else [model]
    return sum(path.stat().st_size for path in files)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _state(step: Step, others: Sequence[Path]) -> str:
    if step_cache.finished(step):
        return "cached: is not run again"
    if step_cache.elsewhere(step, others):
        return "cached by another build: is not run again"
    return f"CANNOT RUN: {step.script.problem}" if step.script.problem else "to run"


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
