"""The ways of ``cog-triton build``: build, check or print the plan, clean."""

from __future__ import annotations

from pathlib import Path

from cog_triton.builder.check_arguments import check_arguments
from cog_triton.builder.config import load_config
from cog_triton.builder.example_families import Families
from cog_triton.builder.legacy.translate import translated
from cog_triton.builder.output_stream import Echo
from cog_triton.builder.plan import Plan, make_plan
from cog_triton.builder.plan_report import as_lines
from cog_triton.builder.run import run_build, stages
from cog_triton.builder.steps import cancellable
from cog_triton.builder.workspace import Workspace
from cog_triton.system.terminal_progress import ProgressLine


def build(config: Path, work_dir: Path, output: Path, echo: Echo, *, cache: bool) -> None:
    """Build the config in the file `config`, see `run_build`."""
    workspace = Workspace(work_dir)
    plan = _planned(config, workspace, echo)
    with ProgressLine(len(stages(plan))) as line:
        run_build(plan, workspace, output, echo=echo, cache=cache, begin=line.begin)


def look(
    config: Path, work_dir: Path, output: Path, echo: Echo, *, check: bool, plan: bool
) -> bool:
    """Check the config in the file `config`, or print its plan, or both; nothing is run.

    Returns:
        Whether all that was to be checked could be.
    """
    workspace = Workspace(work_dir)
    planned = _planned(config, workspace, echo)
    with cancellable():
        checked = check_arguments(planned.steps, echo) if check else True
    if plan:
        for line in as_lines(planned, workspace, output):
            echo(line)
    return checked


def clean(config: Path | None, work_dir: Path, echo: Echo) -> None:
    """Remove what builds left in `work_dir`, all or those of one config."""
    workspace = Workspace(work_dir)
    freed = workspace.clean(None if config is None else load_config(config))
    echo(f"[clean] {workspace.root}: removed {freed / 1e6:.0f} MB")


def _planned(path: Path, workspace: Workspace, echo: Echo) -> Plan:
    config, families = load_config(path), Families()
    # Named by the config as it is written, which `clean` has, too.
    work_dir = workspace.of(config)
    return make_plan(translated(config, families, echo), work_dir, families)
