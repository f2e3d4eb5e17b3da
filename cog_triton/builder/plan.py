"""A build config -> the commands to run, before anything runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cog_triton.builder.check_inputs import check_inputs
from cog_triton.builder.command_line import ArgumentValue, command_line
from cog_triton.builder.config import BuildConfig, StepConfig
from cog_triton.builder.example_families import OWN, Families, Script
from cog_triton.builder.legacy.image_paths import MODEL, relative, resolved
from cog_triton.builder.legacy.translate import translate


@dataclass(frozen=True)
class Step:
    """One subprocess: run `argv` in `cwd`; it reads `input` and writes `output_dir`.

    `args` are the arguments that end `argv`, `env` is what it gets beside our environment, and
    `timeout` is in seconds.
    """

    name: str
    script: Script
    args: dict[str, ArgumentValue]
    cwd: Path
    input: Path
    output_dir: Path
    env: dict[str, str]
    timeout: float | None = None

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

    `config` is in the words of the scripts that run, and `notes` say what was translated.
    """

    config: BuildConfig
    work_dir: Path
    model: Path
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()


def make_plan(config: BuildConfig, work_dir: Path, examples: Path = OWN) -> Plan:
    """Find the scripts of `config` and write out their command lines.

    They run in our own Python, or in COG_TRITON_STEP_PYTHON.

    Args:
        work_dir: where steps run, so that a config names the model ``model``.
        examples: directory of ``<family>/<script>.py``, beside those of TRTLLM_DIR.

    Raises:
        UnknownExample, UnknownScript: list what there is.
        UnknownArgument: an older builder's argument means nothing today, or no step writes what
            an argument wants read.
    """
    families = Families(examples)
    family = families.find(config.example_name)
    translation = translate(config, family, partial(families.offers, family))
    config = translation.config
    check_inputs(config)
    work_dir = Path(os.path.realpath(work_dir))
    steps: list[Step] = []
    for name, step in config.steps():
        env = {key: str(value) for key, value in {**config.env, **step.env}.items()}
        steps.append(
            Step(
                name=name,
                script=families.script(family, step, name),
                args=_paths_resolved(step, config.model_id),
                cwd=work_dir,
                input=steps[-1].output_dir if steps else work_dir / MODEL,
                output_dir=work_dir / relative(step.output_dir),
                env=env,
                timeout=step.timeout if step.timeout is not None else config.timeout,
            )
        )
    return Plan(config, work_dir, work_dir / MODEL, tuple(steps), translation.notes)


def _paths_resolved(step: StepConfig, model_id: str) -> dict[str, ArgumentValue]:
    return {
        key: resolved(value, model_id, MODEL) if isinstance(value, str) else value
        for key, value in step.args.items()
    }
