"""Run of a build, a stage after the other: arguments, the model, its steps, the tar."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from cog_triton.artifact.safetensors_file import read_header
from cog_triton.builder import package, packed_adapters, step_cache
from cog_triton.builder.arguments import MODEL, ArgumentValue
from cog_triton.builder.checks import check_arguments, check_combinations
from cog_triton.builder.packed_adapters import PackedAdapter
from cog_triton.builder.plan import Plan, Step
from cog_triton.builder.sealed_build import STAGES, SealedBuild, SealedPlan
from cog_triton.builder.sealed_config import AnyConfig, SealedConfig
from cog_triton.builder.step import run_step
from cog_triton.builder.translate import planned
from cog_triton.builder.workspace import Echo, Workspace
from cog_triton.download import model_source
from cog_triton.download.model_request import json_object
from cog_triton.errors import EngineCorrupt, InvalidArgument, ModelUnavailable, UnknownScript
from cog_triton.system.terminal import cancellable

_LM_HEAD = "lm_head.weight"
_INDEX = "model.safetensors.index.json"
# Scripts that read the output layer's weights by name.
_READS_LM_HEAD = ("llama",)
# gpt's scripts take the variant from the directory's name, and fail without it.
_VARIANTS = {"gpt2": "gpt2", "gpt_bigcode": "starcoder", "starcoder2": "starcoder2"}


AnyPlan = Plan | SealedPlan


@dataclass
class Build:
    """A build as far as it has come: each stage leaves here what those after it need.

    `held` is left when the build ends, `adapters` are to be packed, and `written` is what each step
    wrote, by the directory that its plan has.
    """

    plan: Plan
    workspace: Workspace
    output: Path
    echo: Echo
    cache: bool
    alone: bool
    held: contextlib.ExitStack
    adapters: Sequence[PackedAdapter] = ()
    written: dict[Path, Path] = field(default_factory=dict)

    def check(self) -> None:
        """Check the steps that are to run, which are all as long as the model is not here.

        Raises:
            UnknownScript: one of them cannot run on this machine.
        """
        others = self.workspace.others(self.plan.work_dir) if self.cache else []
        plan = self.plan
        with contextlib.suppress(ModelUnavailable):
            plan = step_cache.located(plan, self.workspace.models)
        steps = [
            step
            for step in plan.steps
            if not (
                self.cache and (step_cache.finished(step) or step_cache.elsewhere(step, others))
            )
        ]
        problems = [f"{step.name}: {step.script.problem}" for step in steps if step.script.problem]
        if problems:
            raise UnknownScript("\n".join(problems))
        check_arguments(steps, self.echo)
        if steps:
            check_combinations(plan, self.workspace, self.echo)

    def fetch(self) -> None:
        """Wait for the work directory, and put the model and the adapters there."""
        plan = self.plan
        plan.work_dir.mkdir(parents=True, exist_ok=True)
        self.held.enter_context(self.workspace.turn(plan.work_dir, self.echo))
        if self.alone:
            self.workspace.remove_others(plan.work_dir)
        model = model_source.fetch_model(plan.request, self.workspace.models, self.echo)
        self.echo(f"[model] {plan.config.model_id}: {model.path}")
        self.plan = step_cache.fingerprinted(plan, model)
        for link in (plan.model, plan.work_dir / MODEL):
            _point_at(link, model.path)
        for note in notes(plan, model.path):
            self.echo(note)
        if plan.config.lora_adapters:
            self.adapters = packed_adapters.prepare(
                plan.config, model.path, self.workspace.models, plan.work_dir, self.echo
            )

    def step(self, number: int) -> None:
        """Run a step, unless what it would write is here already, or in another work directory."""
        step = self.plan.steps[number]
        for declared, written in self.written.items():
            step = _reading(step, declared, written)
        done = step_cache.finished(step) if self.cache else None
        if done is not None:
            self.echo(f"[{step.name}] already done")
        with contextlib.ExitStack() as turn:
            if self.cache and done is None:
                fingerprint = step.fingerprint or ""
                turn.enter_context(self.workspace.step_turn(step.name, fingerprint, self.echo))
                done = step_cache.adopt(step, self.workspace.others(self.plan.work_dir))
                if done is not None:
                    self.echo(f"[{step.name}] already done by another build")
            written = done or self._run(step)
        if written != step.output_dir:
            self.echo(f"[{step.name}] wrote {written.relative_to(self.plan.work_dir)}")
        self.written[step.output_dir] = written

    def _run(self, step: Step) -> Path:
        # Calibration downloads its data sets itself, as gated as models are.
        token = self.plan.request.token or os.environ.get("HF_TOKEN", "").strip()
        step_cache.forget(step)
        secrets = {"HF_TOKEN": token} if token else {}
        written = run_step(step, self.plan.work_dir / "logs", self.echo, secrets)
        step_cache.remember(step, written)
        return written

    def pack(self) -> None:
        """Pack the engine, unless the output is what the last build packed."""
        with step_cache.packing(self.plan, self.output, self.adapters) as is_packed:
            if self.cache and is_packed:
                self.echo(f"[package] {self.output} is already written")
                return
            self.echo(f"[package] {self.output}")
            package.write(
                self.plan.config,
                self.written[self.plan.steps[-1].output_dir],
                self.plan.model,
                self.output,
                revision=self.plan.here.revision if self.plan.here else None,
                adapters=self.adapters,
                echo=self.echo,
            )


def planned_any(
    config: AnyConfig, work_dir: Path, echo: Echo, added: Sequence[Path] = ()
) -> AnyPlan:
    """Plan of a config of any engine, see `SealedPlan` for `added`; raises as `planned`."""
    if isinstance(config, SealedConfig):
        return SealedPlan.of(config, work_dir, added)
    return planned(config, work_dir, echo)


def stages(plan: AnyPlan) -> Sequence[tuple[str, Callable[[Any], None]]]:
    """What a build does one after another, by the names that progress has for it."""
    if isinstance(plan, SealedPlan):
        return STAGES
    steps = [
        (step.name, partial(Build.step, number=number)) for number, step in enumerate(plan.steps)
    ]
    return [("check", Build.check), ("model", Build.fetch), *steps, ("package", Build.pack)]


def run_build(
    plan: AnyPlan,
    workspace: Workspace,
    output: Path,
    *,
    echo: Echo,
    cache: bool = True,
    alone: bool = False,
    begin: Callable[[str], None] = lambda _stage: None,
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
    with cancellable(), workspace.coded(), contextlib.ExitStack() as held:
        how = (workspace, output, echo, cache, alone, held)
        build = SealedBuild(plan, *how) if isinstance(plan, SealedPlan) else Build(plan, *how)
        for name, run in stages(plan):
            begin(name)
            run(build)
    return output


def _reading(step: Step, declared: Path, written: Path) -> Step:
    """`step` where `written` is the true output directory of an earlier one.

    Arguments that name `declared`, or a directory between the two, name `written` instead.
    """
    between = {declared, *(path for path in written.parents if path.is_relative_to(declared))}

    def moved(value: ArgumentValue) -> ArgumentValue:
        if isinstance(value, str) and value and step.cwd / value in between:
            return str(written.relative_to(step.cwd))
        return value

    args = {key: moved(value) for key, value in step.args.items()}
    return replace(step, args=args, input=written if step.input == declared else step.input)


def _point_at(link: Path, model: Path) -> None:
    """Make `link` name the model; nothing is copied.

    Raises:
        InvalidArgument: something else has the link's name.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise InvalidArgument(f"work_dir: {link} is there and is not this build's link")
    link.symlink_to(model)


def notes(plan: Plan, model: Path) -> Iterator[str]:
    """What to know of `model`, a directory, before the convert step of `plan` runs."""
    first = plan.steps[0]
    family = PurePosixPath(first.script.name).parent.name
    config = json_object(model / "config.json")
    if family in _READS_LM_HEAD and config.get("tie_word_embeddings") and not _has_lm_head(model):
        yield (
            f"[{first.name}] warning: the model ties its embeddings and has no {_LM_HEAD}, for"
            " which TensorRT-LLM before 0.16 fails with \"'NoneType' object has no attribute"
            " 'to'\": if it does, add a copy of the embeddings under that name to the model"
        )
    variant = _VARIANTS.get(str(config.get("model_type")))
    if family == "gpt" and variant is not None and "gpt_variant" not in first.args:
        known = any(name in plan.config.model_id for name in (variant, "santacoder"))
        if not known:
            yield (
                f"[{first.name}] warning: gpt_variant is not given and the model's id does not"
                f" name it, for which {PurePosixPath(first.script.name).name} fails: its"
                f" config.json says {config['model_type']}, so {variant}"
            )


def _has_lm_head(model: Path) -> bool:
    """Whether the weights have an output layer of their own; true where that cannot be told."""
    if (model / _INDEX).is_file():
        return _LM_HEAD in json_object(model / _INDEX).get("weight_map", {})
    files = list(model.glob("*.safetensors"))
    try:
        return not files or any(_LM_HEAD in read_header(file) for file in files)
    except EngineCorrupt:  # the script says what is wrong with it
        return True
