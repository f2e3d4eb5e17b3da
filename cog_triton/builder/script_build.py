"""Build by the scripts of an example family: a stage for each step, and one for the engine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from cog_triton import __version__
from cog_triton.artifact.canary import PROMPT, TOKENS
from cog_triton.artifact.engine_manifest import files_of
from cog_triton.builder import package, packed_adapters
from cog_triton.builder.checks import check_arguments, check_combinations
from cog_triton.builder.packed_adapters import PackedAdapter
from cog_triton.builder.plan import Plan, Step
from cog_triton.builder.script_options import MODEL, ArgumentValue
from cog_triton.builder.step import run_step, written
from cog_triton.builder.workspace import Echo, Stage, Workspace, digest, listing
from cog_triton.download import model_source
from cog_triton.download.model_request import FetchedModel
from cog_triton.errors import BuildStepFailed, ModelUnavailable, UnknownScript
from cog_triton.system.gpus import gpu_names, visible_gpus

_PACKAGES = ("gguf", "numpy", "openvino", "openvino-genai", "openvino-tokenizers", "tokenizers")


class ScriptBuild:
    """A build of `plan`, whose steps are scripts of TensorRT-LLM or of this package."""

    def __init__(self, plan: Plan, workspace: Workspace, echo: Echo) -> None:
        self.plan, self.config = plan, plan.config
        self.workspace, self.echo = workspace, echo
        self._adapters: Sequence[PackedAdapter] = ()

    @property
    def names(self) -> list[str]:
        """Those of the stages that `fetch` will return."""
        return [*(step.name for step in self.plan.steps), package.ENGINE]

    def check(self) -> None:
        """Check the steps that are to run, which are all as long as the model is not here.

        Raises:
            UnknownScript: one of them cannot run on this machine.
            UserError: as `check_arguments` and `check_combinations`.
        """
        done = self.done() if self.workspace.cache else set()
        steps = [step for step in self.plan.steps if step.name not in done]
        problems = [f"{step.name}: {step.script.problem}" for step in steps if step.script.problem]
        if problems:
            raise UnknownScript("\n".join(problems))
        check_arguments(steps, self.echo)
        if steps:
            check_combinations(self.plan, self.workspace, self.echo)

    def here(self) -> FetchedModel | None:
        """The model, if it needs no download; None, too, if it cannot be had."""
        with contextlib.suppress(ModelUnavailable):
            return model_source.locate(self.config.request, self.workspace.models)
        return None

    def done(self) -> set[str]:
        """Names of the steps that need not run, as far as the model is here."""
        if (model := self.here()) is None:
            return set()
        stages = self._steps(model)
        return {stage.name for stage in stages if self.workspace.output(stage).is_dir()}

    def fetch(self) -> list[Stage]:
        """Fetch the model and the adapters; returns what is then to run."""
        plan, models = self.plan, self.workspace.models
        model = model_source.fetch_model(plan.config.request, models, self.echo)
        self.echo(f"[model] {plan.config.model_id}: {model.path}")
        if plan.config.lora_adapters:
            self._adapters = packed_adapters.fetch(plan.config, model.path, models, self.echo)
        steps = self._steps(model)
        inputs = [
            steps[-1].key,
            plan.config.to_yaml(),
            model.revision,
            [visible_gpus(), gpu_names()],
            [PROMPT, TOKENS, versions()],
            [[each.entry.model_dump(), listing(each.adapter.directory)] for each in self._adapters],
        ]
        return [*steps, Stage(package.ENGINE, inputs, partial(self._engine, steps, model))]

    def _steps(self, model: FetchedModel) -> list[Stage]:
        before = digest([str(model.path), listing(model.path)])
        stages: list[Stage] = []
        for step in self.plan.steps:
            inputs = [step.script.name, _code(step), step.args, step.env, before]
            run = partial(self._run, step, list(stages), model)
            stages.append(Stage(step.name, inputs, run))
            before = stages[-1].key
        return stages

    def _run(self, step: Step, before: Sequence[Stage], model: FetchedModel, root: Path) -> None:
        """Run a step in `root`, which shows it the model and the outputs of those before it."""
        links = [root / self.plan.model, root / MODEL]
        for link in links:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(model.path)
        for earlier, stage in zip(self.plan.steps, before, strict=False):
            output = self.workspace.output(stage)
            for name, path in files_of(output).items():
                links.append(root / name)
                links[-1].parent.mkdir(parents=True, exist_ok=True)
                links[-1].unlink(missing_ok=True)
                links[-1].symlink_to(path)
            step = _reading(step, earlier.output_dir, written(earlier, output))
        shutil.rmtree(root / step.output_dir, ignore_errors=True)
        # Calibration downloads its data sets itself, as gated as models are.
        token = self.config.request.token or os.environ.get("HF_TOKEN", "").strip()
        secrets = {"HF_TOKEN": token} if token else {}
        log = self.workspace.log(step.name, root)
        stream = run_step(step, root, log, self.echo, secrets)
        for link in links:
            if link.is_symlink():
                link.unlink()
        try:
            found = written(step, root)
        except BuildStepFailed as error:
            raise BuildStepFailed(f"{error.detail}{stream.end}") from None
        if found != step.output_dir:
            self.echo(f"[{step.name}] wrote {found}")

    def _engine(self, steps: Sequence[Stage], model: FetchedModel, root: Path) -> None:
        last = self.workspace.output(steps[-1])
        package.lay_out(
            self.config,
            last / written(self.plan.steps[-1], last),
            model,
            root,
            adapters=self._adapters,
            echo=self.echo,
        )


def versions() -> dict[str, str]:
    """Versions of all that can change what a step writes in our own Python."""
    found = {"python": platform.python_version(), "cog_triton": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _code(step: Step) -> list[Any]:
    """Code that the step runs: that of its family, or its command, and its Python."""
    path = step.script.path
    if path.suffix != ".py":
        return [*_stat(path), *python_of(step.script.python)]
    return [code_of(path.parent), *python_of(step.script.python)]


def code_of(family: Path) -> list[list[str]]:
    """The scripts in the directory of an example family, by name and SHA-256."""
    files = sorted(family.glob("*.py"))
    return [[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in files]


def python_of(name: str) -> list[Any]:
    """A Python that is run, and what is installed in it."""
    if name == sys.executable:
        return [versions()]
    python = Path(name)
    packages = sorted(python.parent.parent.glob("lib/python3.*/site-packages"))
    return [str(python), __version__, *map(_stat, packages)]


def _stat(path: Path) -> list[Any]:
    with contextlib.suppress(OSError):
        stat = path.stat()
        return [str(path), stat.st_size, stat.st_mtime_ns]
    return [str(path)]


def _reading(step: Step, declared: str, found: str) -> Step:
    """`step` if `found` is the true output directory of an earlier one, which names `declared`.

    Arguments that name `declared`, or a directory between the two, name `found` instead.
    """
    top, true = PurePosixPath(declared), PurePosixPath(found)
    between = {top, *(path for path in true.parents if path.is_relative_to(top))}

    def moved(value: ArgumentValue) -> ArgumentValue:
        if isinstance(value, str) and value and PurePosixPath(value) in between:
            return found
        return value

    return replace(step, args={key: moved(value) for key, value in step.args.items()})
