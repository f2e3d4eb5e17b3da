"""A build config -> the commands to run, before anything runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import cog_triton
from cog_triton.build.arguments import command_line
from cog_triton.build.config import BuildConfig
from cog_triton.errors import UnknownExample, UnknownScript, nearest
from cog_triton.settings import load_settings

EXAMPLES = Path(cog_triton.__file__).parent / "examples"
MODEL = "model"


@dataclass(frozen=True)
class Step:
    """One subprocess: run `argv` in `cwd`; it reads `input` and writes `output_dir`."""

    name: str
    script: Path
    argv: tuple[str, ...]
    cwd: Path
    input: Path
    output_dir: Path


@dataclass(frozen=True)
class Plan:
    """The steps of a build in order; the last one's output is the engine directory."""

    work_dir: Path
    model: Path
    steps: tuple[Step, ...]

    @property
    def engine_dir(self) -> Path:
        return self.steps[-1].output_dir


def make_plan(config: BuildConfig, work_dir: Path, examples: Path = EXAMPLES) -> Plan:
    """Find the scripts of `config` and write out their command lines.

    They run in our own Python, or in COG_TRITON_STEP_PYTHON.

    Args:
        work_dir: where steps run, so that a config names the model ``model``.
        examples: directory of ``<family>/<script>.py``.

    Raises:
        UnknownExample, UnknownScript: list what there is.
    """
    families = sorted(p.name for p in examples.iterdir() if p.is_dir() and scripts_of(p))
    if config.example_name not in families:
        raise UnknownExample(
            f"example_name {config.example_name!r}: there is {', '.join(families)}"
            f"{nearest(config.example_name, families)}"
        )
    family = examples / config.example_name
    work_dir = work_dir.resolve()
    python = str(load_settings().cog_triton_step_python or sys.executable)
    steps: list[Step] = []
    for name, step in config.steps():
        if step.script not in scripts_of(family):
            raise UnknownScript(
                f"{name}.script {step.script!r}: {config.example_name} has "
                f"{', '.join(scripts_of(family))}{nearest(step.script, scripts_of(family))}"
            )
        script = family / step.script
        steps.append(
            Step(
                name=name,
                script=script,
                argv=(python, str(script), *command_line(step.args)),
                cwd=work_dir,
                input=steps[-1].output_dir if steps else work_dir / MODEL,
                output_dir=work_dir / step.output_dir,
            )
        )
    return Plan(work_dir, work_dir / MODEL, tuple(steps))


def scripts_of(family: Path) -> list[str]:
    """The scripts a family offers; names with an underscore before them are its own helpers."""
    return sorted(path.name for path in family.glob("*.py") if not path.name.startswith("_"))
