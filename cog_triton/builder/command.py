"""The ways of ``cog-triton build``: build, check or print the plan, clean."""

from __future__ import annotations

from pathlib import Path

from cog_triton.builder.checks import check_arguments, check_combinations
from cog_triton.builder.config import BuildConfig, load_config
from cog_triton.builder.example_families import Families
from cog_triton.builder.plan import Plan, make_plan
from cog_triton.builder.upgrade import upgraded
from cog_triton.builder.workspace import Echo, Workspace
from cog_triton.system.terminal import cancellable


def planned(config: BuildConfig, workspace: Workspace, echo: Echo) -> Plan:
    """Plan of `config`, upgraded; in the work directory of the config as it is written.

    Raises:
        UnknownExample, UnknownScript, UnknownArgument, BuildConfigInvalid, EngineIncompatible: as
            `upgraded` and `make_plan`.
    """
    families = Families()
    work_dir = workspace.of(config)  # which `clean` has, too
    return make_plan(upgraded(config, families, echo), work_dir, families)


def build(config: Path, work_dir: Path, output: Path, echo: Echo, *, cache: bool) -> str:
    """Build the config in the file `config`, see `run_build`; returns how long it took."""
    # A check, which is to be done within a second, has no need of these.
    from cog_triton.builder.run import run_build, stages
    from cog_triton.system.terminal_progress import BuildProgress

    workspace = Workspace(work_dir)
    plan = _planned(config, workspace, echo)
    with BuildProgress(echo, len(stages(plan))) as progress:
        run_build(plan, workspace, output, echo=progress.echo, cache=cache, begin=progress.begin)
    return progress.elapsed


def look(
    config: Path,
    work_dir: Path,
    output: Path,
    echo: Echo,
    *,
    check: bool,
    plan: bool,
    against_installed: bool = False,
    sm: int | None = None,
) -> bool:
    """Check the config in the file `config`, or print its plan, or both; nothing is run.

    Args:
        against_installed: check against the scripts themselves, see `check_arguments`.
        sm: SM of the GPU that the engine is for, see `check_combinations`.

    Returns:
        Whether all that was to be checked could be.
    """
    workspace = Workspace(work_dir)
    plan_of = _planned(config, workspace, echo)
    with cancellable():
        checked = not check or check_arguments(
            plan_of.steps, echo, against_installed=against_installed
        )
        if check:
            check_combinations(plan_of, workspace, echo, sm)
        if check and plan_of.config.lora_adapters:
            from cog_triton.builder import packed_adapters

            for line in packed_adapters.look(plan_of.config, _local_model(plan_of)):
                echo(f"[check] lora_adapters: {line}")
    if plan:
        from cog_triton.builder.plan_report import as_lines

        for line in as_lines(plan_of, workspace, output):
            echo(line)
    return checked


def clean(config: Path | None, work_dir: Path, echo: Echo) -> None:
    """Remove what builds left in `work_dir`, all or those of one config."""
    workspace = Workspace(work_dir)
    freed = workspace.clean(None if config is None else load_config(config))
    echo(f"[clean] {workspace.root}: removed {freed / 1e6:.0f} MB")


def _local_model(plan: Plan) -> Path | None:
    """The model, where it is a directory that needs no download."""
    path = Path(plan.config.model_id).expanduser()
    return path if path.is_dir() and plan.config.model_tar_url is None else None


def _planned(path: Path, workspace: Workspace, echo: Echo) -> Plan:
    return planned(load_config(path), workspace, echo)
