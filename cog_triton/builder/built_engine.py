"""Check of a built engine against what its build config says of serving it.

A mistake costs no build: the engine stays in the step cache.
"""

from __future__ import annotations

from pathlib import Path

from cog_triton.artifact.engine_config import EngineConfig
from cog_triton.builder.config import BuildConfig
from cog_triton.engines.tensorrt_llm import render_config, setting_rules
from cog_triton.engines.tensorrt_llm.backend_settings import Parameters
from cog_triton.engines.tensorrt_llm.engine_directory import Engine
from cog_triton.engines.tensorrt_llm.releases import ReleaseContract
from cog_triton.engines.tensorrt_llm.runtime_settings import carried
from cog_triton.errors import BuildConfigInvalid


def check(config: BuildConfig, built: EngineConfig, directory: Path) -> None:
    """Check `config`'s `runtime` against the engine in `directory`, whose config.json is `built`.

    Raises:
        BuildConfigInvalid: names every setting that this engine cannot be served with.
    """
    given = carried(config.runtime)
    if not given:
        return
    engine = Engine(directory, built, ReleaseContract.of(built.version))
    parameters = render_config.resolve_defaults(Parameters.parse(given), engine)
    problems = [
        f"runtime.{name}: {shown}: {rule}"
        for name, shown, rule in setting_rules.problems(parameters, engine)
        if name in given
    ]
    if problems:
        raise BuildConfigInvalid("\n".join(problems))
