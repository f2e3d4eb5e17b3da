"""Report of a plan: the model, disk space and command lines as text to read and to copy from."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from cog_triton.builder.plan import Plan, Step
from cog_triton.builder.script_build import ScriptBuild
from cog_triton.builder.workspace import Workspace, existing
from cog_triton.download import model_source
from cog_triton.download.model_request import FetchedModel
from cog_triton.errors import ModelUnavailable
from cog_triton.system.redaction import redact_address


def as_lines(plan: Plan, workspace: Workspace, output: Path) -> Iterator[str]:
    """The model, the directories, the disk space and every step of `plan`.

    Nothing is written. Only what is one word, as a path, is ever wider than 80 columns.
    """
    yield f"model     {plan.config.model_id}"
    model, download = None, None
    try:
        model = model_source.locate(plan.config.request, workspace.models)
        download = model_source.size(plan.config.request, workspace.models)
        size = "of a size that could not be asked for" if download is None else _gb(download)
        yield f"          {model.path if model else f'to be downloaded, {size}'}"
    except ModelUnavailable as error:
        yield f"          NOT HERE: {error}"
    for name, adapter in plan.config.lora_adapters.items():
        at = adapter.revision or adapter.sha256
        yield f"lora      {name}: {redact_address(adapter.source)}{f' at {at}' if at else ''}"
    done = ScriptBuild(plan, workspace, lambda _: None).done()
    yield f"work dir  {workspace.root}"
    missing = sum(step.name not in done for step in plan.steps)
    yield f"          {_disk(workspace, model, download, missing)}"
    yield f"engine    {output}"
    for step in plan.steps:
        yield ""
        yield f"{step.name:<8}  {'cached: is not run again' if step.name in done else _state(step)}"
        yield f"  reads   {step.input}"
        yield f"  writes  {step.output_dir}"
        yield from (f"  {line}" for line in _command(step))


def _disk(
    workspace: Workspace, model: FetchedModel | None, download: int | None, missing: int
) -> str:
    """Free and needed: a step that runs, and the tar, take roughly as much as the model."""
    free = f"{_gb(shutil.disk_usage(existing(workspace.root)).free)} free"
    size = _size(model.path) if model else download
    if size is None:
        return f"{free}; how much is needed is not known"
    needed = (0 if model else size) + (missing + 1) * size
    return f"{free}, about {_gb(needed)} needed"


def _size(model: Path) -> int:
    files = [path for path in model.rglob("*") if path.is_file()] if model.is_dir() else [model]
    return sum(path.stat().st_size for path in files)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _state(step: Step) -> str:
    return f"CANNOT RUN: {step.script.problem}" if step.script.problem else "to run"


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
