"""Plan: the steps of a build config as command lines, before anything runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from cog_triton.builder.arguments import (
    MODEL,
    ArgumentValue,
    command_line,
    named,
    relative,
    resolved,
    shown,
)
from cog_triton.builder.config import BuildConfig, StepConfig
from cog_triton.builder.example_families import Families, Script
from cog_triton.download.model_source import FetchedModel, ModelRequest
from cog_triton.errors import UnknownArgument

_INPUT_ARGUMENTS = ("model_dir", "checkpoint_dir")


@dataclass(frozen=True)
class Step:
    """One subprocess: run `argv` in `cwd`; it reads `input` and writes `output_dir`.

    `args` are the arguments that end `argv`, `env` is what it gets beside our environment,
    `timeout` is in seconds, and `fingerprint` (see `step_cache`) is None until the model is here.
    """

    name: str
    script: Script
    args: dict[str, ArgumentValue]
    cwd: Path
    input: Path
    output_dir: Path
    env: dict[str, str]
    timeout: float | None = None
    fingerprint: str | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        return (*self.script.argv, *command_line(self.args))

    def in_directory(self, cwd: Path) -> Step:
        """This step as the plan of another work directory has it."""
        return replace(
            self,
            cwd=cwd,
            input=cwd / self.input.relative_to(self.cwd),
            output_dir=cwd / self.output_dir.relative_to(self.cwd),
        )

    def reading(self, declared: Path, written: Path) -> Step:
        """This step where `written` is the true output directory of an earlier one.

        Arguments that name `declared`, or a directory between the two, name `written` instead.
        """
        between = {declared, *(path for path in written.parents if path.is_relative_to(declared))}

        def moved(value: ArgumentValue) -> ArgumentValue:
            if isinstance(value, str) and value and self.cwd / value in between:
                return str(written.relative_to(self.cwd))
            return value

        args = {key: moved(value) for key, value in self.args.items()}
        return replace(self, args=args, input=written if self.input == declared else self.input)


@dataclass(frozen=True)
class Plan:
    """The steps of `config` in order; the last one's output is the engine directory.

    `request` is the model to fetch, `here` where it is if that needs no download, as far as was
    looked (see `step_cache.located`), and `model` is where the steps find it. `family` is
    `Families.find`'s.
    """

    config: BuildConfig
    work_dir: Path
    request: ModelRequest
    model: Path
    steps: tuple[Step, ...]
    family: str = ""
    here: FetchedModel | None = None


def make_plan(config: BuildConfig, work_dir: Path, families: Families) -> Plan:
    """Find the scripts of `config` and write out their command lines.

    Args:
        config: for the scripts that `families` has, see `upgrade.translate`.
        work_dir: where steps run; a config names the model ``model``, and they get its own name.

    Raises:
        UnknownExample, UnknownScript: list what there is.
        UnknownArgument: no step writes what an argument wants read.
    """
    family = families.find(config.example_name)
    check_inputs(config)
    work_dir = Path(os.path.realpath(work_dir))
    model = work_dir / named(config.model_id)
    steps: list[Step] = []
    for name, step in config.steps():
        env = {key: str(value) for key, value in {**config.env, **step.env}.items()}
        steps.append(
            Step(
                name=name,
                script=families.script(family, step, name),
                args=_paths_resolved(step, config.model_id),
                cwd=work_dir,
                input=steps[-1].output_dir if steps else model,
                output_dir=work_dir / relative(step.output_dir),
                env=env,
                timeout=step.timeout if step.timeout is not None else config.timeout,
            )
        )
    return Plan(config, work_dir, _request(config), model, tuple(steps), family)


def _request(config: BuildConfig) -> ModelRequest:
    token = config.hf_token
    return ModelRequest(
        model_id=config.model_id,
        revision=config.revision,
        files=None if config.files is None else tuple(config.files),
        weight_format=config.weight_format,
        model_tar_url=config.model_tar_url,
        model_tar_sha256=config.model_tar_sha256,
        token=None if token is None else token.get_secret_value(),
    )


def _paths_resolved(step: StepConfig, model_id: str) -> dict[str, ArgumentValue]:
    def path(text: str) -> str:
        found = resolved(text, model_id, MODEL)
        return named(model_id) if found and PurePosixPath(found) == PurePosixPath(MODEL) else found

    return {
        key: path(value) if isinstance(value, str) else value for key, value in step.args.items()
    }


def check_inputs(config: BuildConfig) -> None:
    """Refuse a directory that is neither the model nor an earlier step's output.

    An absolute path may be anything, but for ``/src/...``, which is the work directory.

    Raises:
        UnknownArgument: one line for each of them: YAML path, value and rule.
    """
    lines: list[str] = []
    available = [PurePosixPath(MODEL)]
    for name, step in config.steps():
        for key in _INPUT_ARGUMENTS:
            value = step.args.get(key)
            if isinstance(value, str) and not _is_available(value, config.model_id, available):
                lines.append(
                    f"{name}.args.{key}: {shown(value)}: no step before {name} writes it, and it"
                    " is not the model: is the convert step missing?"
                )
        # A script may also write beside its output_dir, where its arguments say.
        texts = [step.output_dir, *(v for v in step.args.values() if isinstance(v, str) and v)]
        available += [PurePosixPath(relative(text)) for text in texts]
    if lines:
        raise UnknownArgument("\n".join(lines))


def _is_available(value: str, model_id: str, available: list[PurePosixPath]) -> bool:
    path = PurePosixPath(resolved(value, model_id, MODEL))
    return path.is_absolute() or any(
        path.is_relative_to(known) or known.is_relative_to(path) for known in available
    )
