"""Check of combinations: a plan's config against all rules, before any step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from cog_triton.builder.combinations.facts import Facts, installed_version
from cog_triton.builder.combinations.rules import breaches_of, rules
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.model_notes import json_object
from cog_triton.builder.output_stream import Echo
from cog_triton.builder.plan import Plan
from cog_triton.builder.workspace import Workspace
from cog_triton.download import model_source
from cog_triton.errors import BuildConfigInvalid, ModelUnavailable, UnknownExample
from cog_triton.sizing.model_shape import ModelShape, read_shape
from cog_triton.system.gpus import visible_gpus


def check_combinations(plan: Plan, workspace: Workspace, echo: Echo, sm: int | None = None) -> None:
    """Check what the arguments of `plan` are together, with its model and its GPUs.

    config.json of the model is read where the model is; with several ranks, which have to share
    it, it is asked of the hub once.

    Args:
        sm: SM of the GPU that the engine is for, where the config does not say it; if None, it is
            that of this machine's.

    Raises:
        BuildConfigInvalid: one line for each breach: YAML path, value, rule, and the nearest value
            that holds; UnknownExample, EngineIncompatible or ModelUnavailable where all breaches
            are of that kind.
    """
    facts = _facts(plan, plan.config.sm or sm, workspace, echo)
    found = list(breaches_of(facts))
    if not found:
        echo(f"[check] combinations: OK: none of {len(rules())} rules is broken")
        return
    errors = {rule.error_type for rule, _ in found}
    error = errors.pop() if len(errors) == 1 else BuildConfigInvalid
    raise error("\n".join(rule.line(broken) for rule, broken in found))


def check_family(config: BuildConfig, family: str) -> None:
    """Refuse a family whose engines are not served, before its arguments are looked at.

    Raises:
        UnknownExample: names it, and the reason.
    """
    for rule, broken in breaches_of(Facts(config, PurePosixPath(family).name)):
        if rule.error_type is UnknownExample:
            raise UnknownExample(rule.line(broken))


def _facts(plan: Plan, sm: int | None, workspace: Workspace, echo: Echo) -> Facts:
    """Facts of `plan`, whose engine is for `sm`, or for the GPUs of this machine."""
    config = plan.config
    family = PurePosixPath(plan.family).name
    recorded = all(step.script.recorded for step in plan.steps)
    sms = () if family == "openvino" else visible_gpus() if sm is None else (sm,)
    facts = Facts(config, family, installed_version(recorded), tuple(sorted(set(sms))))
    model = _model(facts, plan, workspace, echo)
    return Facts(config, family, facts.version, facts.sms, model, _shape(model))


def _model(facts: Facts, plan: Plan, workspace: Workspace, echo: Echo) -> Mapping[str, Any]:
    """config.json of the model; empty if it is not known, which is told where ranks share it."""
    request, reason = plan.request, "the model is not here"
    local = Path(request.model_id).expanduser() / "config.json"
    if request.model_tar_url is None and local.is_file():
        return json_object(local)
    try:
        here = model_source.locate(request, workspace.models)
        if here is not None:
            return json_object(here.path / "config.json")
        if facts.ranks > 1 and request.model_tar_url is None:
            from cog_triton.download import hub  # it takes half a second
            from cog_triton.sizing.model_files import config_of

            return config_of(hub.describe(request)[1], request.model_id)
    except ModelUnavailable as error:
        reason = error.detail
    if facts.ranks > 1:
        echo(f"[check] combinations: heads, layers and vocabulary are NOT CHECKED: {reason}")
    return {}


def _shape(model: Mapping[str, Any]) -> ModelShape | None:
    try:
        return read_shape(model, "config.json") if model else None
    except BuildConfigInvalid:  # of an architecture that names its sizes otherwise
        return None
