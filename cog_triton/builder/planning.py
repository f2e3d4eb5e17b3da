"""Planning: a config, as it was loaded, made into the plan that checks and builds have."""

from __future__ import annotations

from cog_triton.builder.combinations.check import check_family
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.example_families import Families
from cog_triton.builder.legacy.translate import translated
from cog_triton.builder.output_stream import Echo
from cog_triton.builder.plan import Plan, make_plan
from cog_triton.builder.precision_words import spelled_out
from cog_triton.builder.workspace import Workspace


def planned(config: BuildConfig, workspace: Workspace, echo: Echo) -> Plan:
    """Plan of `config`, its words spelled out and its legacy options translated.

    Raises:
        UnknownExample, UnknownScript, UnknownArgument, BuildConfigInvalid, EngineIncompatible: as
            `spelled_out`, `translated` and `make_plan`.
    """
    families = Families()
    check_family(config, families.find(config.example_name))
    # Named by the config as it is written, which `clean` has, too.
    work_dir = workspace.of(config)
    ready = translated(spelled_out(config, families, echo), families, echo)
    return make_plan(ready, work_dir, families)
