"""Canary of a build: made by the built engine, where its family is deterministic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from cog_triton.artifact.canary import Canary
from cog_triton.builder import step_python
from cog_triton.builder.canary_run import ENGINES
from cog_triton.errors import BuildStepFailed

Echo = Callable[[str], None]

_TIMEOUT_S = 600


def make(family: str, engine_dir: Path, echo: Echo) -> Canary | None:
    """Canary of the engine at `engine_dir`; None, with a line to `echo`, if it cannot run here.

    An engine without one is served all the same: only a roll to it is less sure.
    """
    if family not in ENGINES:
        return None
    program = ["-m", "cog_triton.builder.canary_run", family, str(engine_dir.resolve())]
    try:
        return Canary.model_validate_json(step_python.ask(program, "the canary", _TIMEOUT_S))
    except (BuildStepFailed, ValidationError) as error:
        lines = str(error).strip().splitlines()
        echo(f"[package] warning: no canary, as the engine does not answer here: {lines[-1]}")
        return None
