"""Run a build: what is checked, fetched, run and packed, in this order."""

from __future__ import annotations

import os
from pathlib import Path

from cog_triton.builder import model, package, step_cache
from cog_triton.builder.check_arguments import check_arguments
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.example_families import OWN
from cog_triton.builder.legacy.translate import translation_lines
from cog_triton.builder.output_stream import Echo
from cog_triton.builder.plan import Plan, Step, make_plan
from cog_triton.builder.steps import cancellable, run_step
from cog_triton.builder.workspace import Workspace, locked
from cog_triton.download import model_source
from cog_triton.download.model_request import FetchedModel
from cog_triton.errors import UnknownScript


def run_build(
    config: BuildConfig,
    workspace: Workspace,
    output: Path,
    *,
    echo: Echo,
    examples: Path = OWN,
    cache: bool = True,
    alone: bool = False,
) -> Path:
    """Build `config` and write the engine to `output`.

    Args:
        workspace: made if missing; finished steps found there are not run again.
        output: the engine.tar to write, .tar, .tar.gz or .tar.zst; it appears complete or not at
            all.
        echo: gets every line of progress, without newline.
        examples: directory of ``<family>/<script>.py``, beside TensorRT-LLM's.
        cache: False to run every step again.
        alone: remove what builds of other configs have left, so that disks do not fill up.

    Returns:
        `output`.

    Raises:
        InvalidArgument: `output` has another suffix or cannot be written there, or the workspace
            cannot be used.
        DiskFull: no space was left.
        UserError: E1300-E1306, as the config, its arguments, the model or a script finds.
        BuildStepFailed, BuildStepTimeout: a step ended with an error of its own, or did not end.
        BuildCancelled: KeyboardInterrupt or SIGTERM; the step's processes are gone.
    """
    package.check(output)
    with cancellable(), workspace.coded():
        work_dir = workspace.of(config)
        plan = make_plan(config, work_dir, examples)
        for line in translation_lines(plan.config, plan.notes):
            echo(line)
        others = workspace.others(work_dir) if cache else []
        here = model.locate(plan.config, workspace.models)
        check_arguments(plan, echo, _unfinished(plan, here, others, cache))
        work_dir.mkdir(parents=True, exist_ok=True)
        with locked(work_dir):
            if alone:
                workspace.remove_others(work_dir)
            request = model.request_of(plan.config)
            fetched = model_source.fetch_model(request, workspace.models, echo)
            echo(f"[model] {config.model_id}: {fetched.path}")
            model.point_at(plan.model, fetched.path)
            engine_dir, fingerprint = _run_steps(plan, fetched.path, others, cache, echo)
            if cache and step_cache.is_packed(work_dir, fingerprint, output):
                echo(f"[package] {output} is already written")
            else:
                echo(f"[package] {output}")
                package.write(
                    plan.config,
                    engine_dir,
                    plan.model,
                    output,
                    revision=fetched.revision,
                    echo=echo,
                )
                step_cache.remember_packed(work_dir, fingerprint, output)
    return output


def _unfinished(
    plan: Plan, here: FetchedModel | None, others: list[Path], cache: bool
) -> list[str]:
    """The names of the steps that are to run, as far as can be told before the model is here.

    Raises:
        UnknownScript: one of them cannot run on this machine.
    """
    names = [step.name for step in plan.steps]
    if cache and here is not None:
        names = [
            step.name
            for step, wanted in zip(plan.steps, step_cache.of_steps(plan, here.path), strict=True)
            if not (step_cache.finished(step, wanted) or step_cache.elsewhere(step, wanted, others))
        ]
    problems = [
        f"{s.name}: {s.script.problem}" for s in plan.steps if s.name in names and s.script.problem
    ]
    if problems:
        raise UnknownScript("\n".join(problems))
    return names


def _run_steps(
    plan: Plan, source: Path, others: list[Path], cache: bool, echo: Echo
) -> tuple[Path, str]:
    """The engine directory, and the fingerprint of the step that wrote it."""
    moved: dict[Path, Path] = {}
    # Calibration downloads its data sets itself, as gated as models are.
    given = plan.config.hf_token
    token = given.get_secret_value() if given else os.environ.get("HF_TOKEN", "").strip()
    secrets = {"HF_TOKEN": token} if token else {}
    written, wanted = plan.model, ""
    for step, wanted in zip(plan.steps, step_cache.of_steps(plan, source), strict=True):
        done = step_cache.finished(step, wanted) if cache else None
        if done is not None:
            echo(f"[{step.name}] already done")
        elif cache and (done := step_cache.adopt(step, wanted, others)) is not None:
            echo(f"[{step.name}] already done by another build")
        written = done or _run(step, wanted, moved, plan.work_dir / "logs", echo, secrets)
        if written != step.output_dir:
            echo(f"[{step.name}] wrote {written.relative_to(plan.work_dir)}")
            moved[step.output_dir] = written
    return written, wanted


def _run(
    step: Step,
    wanted: str,
    moved: dict[Path, Path],
    log_dir: Path,
    echo: Echo,
    secrets: dict[str, str],
) -> Path:
    step_cache.forget(step)
    for declared, written in moved.items():
        step = step.reading(declared, written)
    done = run_step(step, log_dir, echo, secrets)
    step_cache.remember(step, wanted, done)
    return done
