"""Run of a plan: check, fetch the model, run the steps, pack engine.tar, in this order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from cog_triton.builder import model_notes, package, packed_adapters, step_cache
from cog_triton.builder.cancellation import cancellable
from cog_triton.builder.check_arguments import check_arguments
from cog_triton.builder.combinations.check import check_combinations
from cog_triton.builder.legacy.image_paths import MODEL
from cog_triton.builder.output_stream import Echo
from cog_triton.builder.plan import Plan, Step
from cog_triton.builder.steps import run_step
from cog_triton.builder.workspace import Workspace, point_at
from cog_triton.download import model_source
from cog_triton.errors import ModelUnavailable, UnknownScript

CHECK_STAGE, MODEL_STAGE, PACKAGE_STAGE = "check", "model", "package"


def stages(plan: Plan) -> list[str]:
    """What `run_build` does one after another: arguments, the model, the steps, the tar."""
    return [CHECK_STAGE, MODEL_STAGE, *(step.name for step in plan.steps), PACKAGE_STAGE]


def run_build(
    plan: Plan,
    workspace: Workspace,
    output: Path,
    *,
    echo: Echo,
    cache: bool = True,
    alone: bool = False,
    begin: Callable[[str], None] = lambda _step: None,
) -> Path:
    """Build the engine of `plan` and write it to `output`.

    Args:
        workspace: made if missing; finished steps found there are not run again.
        output: the engine.tar to write, .tar, .tar.gz or .tar.zst; it appears complete or not at
            all.
        echo: gets every line of progress, without newline.
        cache: False to run every step again.
        alone: remove what builds of other configs have left, so that disks do not fill up.
        begin: gets the name of each of `stages` as it begins.

    Returns:
        `output`.

    Raises:
        InvalidArgument: `output` has another suffix or cannot be written there, or the workspace
            cannot be used.
        DiskFull: no space was left.
        UserError: E1300-E1306, as the arguments, the model or a script finds.
        BuildStepFailed, BuildStepTimeout: a step ended with an error of its own, or did not end.
        BuildCancelled: KeyboardInterrupt or SIGTERM; the step's processes are gone.
    """
    package.check(output, echo)
    with cancellable(), workspace.coded():
        begin(CHECK_STAGE)
        steps = _to_run(plan, workspace, cache)
        check_arguments(steps, echo)
        if steps:
            check_combinations(plan, workspace, echo)
        plan.work_dir.mkdir(parents=True, exist_ok=True)
        with workspace.turn(plan.work_dir, echo):
            if alone:
                workspace.remove_others(plan.work_dir)
            begin(MODEL_STAGE)
            plan = _with_model(plan, workspace, echo)
            fetched = plan.here
            assert fetched is not None
            adapters = packed_adapters.prepare(
                plan.config, fetched.path, workspace.models, plan.work_dir, echo
            )
            engine_dir = _run_steps(plan, workspace, cache, echo, begin)
            begin(PACKAGE_STAGE)
            with step_cache.packing(plan, output, adapters) as is_packed:
                if cache and is_packed:
                    echo(f"[package] {output} is already written")
                else:
                    echo(f"[package] {output}")
                    package.write(
                        plan.config,
                        engine_dir,
                        plan.model,
                        output,
                        revision=fetched.revision,
                        adapters=adapters,
                        echo=echo,
                    )
    return output


def _with_model(plan: Plan, workspace: Workspace, echo: Echo) -> Plan:
    """`plan` with its model fetched, and linked to where its steps look for it."""
    fetched = model_source.fetch_model(plan.request, workspace.models, echo)
    echo(f"[model] {plan.config.model_id}: {fetched.path}")
    plan = step_cache.fingerprinted(plan, fetched)
    for link in (plan.model, plan.work_dir / MODEL):
        point_at(link, fetched.path)
    for note in model_notes.notes(plan, fetched.path):
        echo(note)
    return plan


def _to_run(plan: Plan, workspace: Workspace, cache: bool) -> list[Step]:
    """The steps that are to run; before the model is here, all.

    Raises:
        UnknownScript: one of them cannot run on this machine.
    """
    others = workspace.others(plan.work_dir) if cache else []
    with contextlib.suppress(ModelUnavailable):
        plan = step_cache.located(plan, workspace.models)
    steps = [
        step
        for step in plan.steps
        if not (cache and (step_cache.finished(step) or step_cache.elsewhere(step, others)))
    ]
    problems = [f"{step.name}: {step.script.problem}" for step in steps if step.script.problem]
    if problems:
        raise UnknownScript("\n".join(problems))
    return steps


def _run_steps(
    plan: Plan, workspace: Workspace, cache: bool, echo: Echo, begin: Callable[[str], None]
) -> Path:
    """Run the steps that are not finished; the engine directory."""
    moved: dict[Path, Path] = {}
    # Calibration downloads its data sets itself, as gated as models are.
    token = plan.request.token or os.environ.get("HF_TOKEN", "").strip()
    secrets = {"HF_TOKEN": token} if token else {}
    written = plan.model
    for step in plan.steps:
        begin(step.name)
        done = step_cache.finished(step) if cache else None
        if done is not None:
            echo(f"[{step.name}] already done")
        with contextlib.ExitStack() as turn:
            if cache and done is None:
                turn.enter_context(workspace.step_turn(step.name, step.fingerprint or "", echo))
                done = step_cache.adopt(step, workspace.others(plan.work_dir))
                if done is not None:
                    echo(f"[{step.name}] already done by another build")
            written = done or _run(step, moved, plan.work_dir / "logs", echo, secrets)
        if written != step.output_dir:
            echo(f"[{step.name}] wrote {written.relative_to(plan.work_dir)}")
            moved[step.output_dir] = written
    return written


def _run(
    step: Step, moved: dict[Path, Path], log_dir: Path, echo: Echo, secrets: dict[str, str]
) -> Path:
    step_cache.forget(step)
    for declared, written in moved.items():
        step = step.reading(declared, written)
    done = run_step(step, log_dir, echo, secrets)
    step_cache.remember(step, done)
    return done
