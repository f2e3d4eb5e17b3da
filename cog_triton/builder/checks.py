"""Checks before anything runs: each argument by itself, and what does not go together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from cog_triton.builder.arguments import ArgumentValue, command_line, shown
from cog_triton.builder.plan import Plan, Step
from cog_triton.builder.rules import RULES, Facts, breaches
from cog_triton.builder.script_options import Option, ScriptOptions, known_options
from cog_triton.builder.workspace import Echo, Workspace
from cog_triton.download import model_source
from cog_triton.download.model_request import json_object
from cog_triton.errors import BuildConfigInvalid, ModelUnavailable, UnknownArgument, nearest
from cog_triton.removed import check_keys
from cog_triton.sizing.memory_sum import ModelShape, read_shape
from cog_triton.system.gpus import visible_gpus
from cog_triton.system.paths import expanded

_TYPES: dict[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "must be a whole number"),
    "float": (float, "must be a number"),
}
# What argparse takes as a value although it starts with a dash.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


def check_arguments(steps: Sequence[Step], echo: Echo) -> bool:
    """Check the arguments of `steps` against the recorded options of their scripts.

    Args:
        echo: gets a line for each step, which says what its options were read from, or that its
            arguments could not be checked.

    Returns:
        Whether all could be checked.

    Raises:
        UnknownArgument: one line for each mistake of each step: YAML path, value and rule.
    """
    lines: list[str] = []
    complete = True
    for step in steps:
        label = PurePosixPath(step.script.name).name
        known = known_options(step.script.name) if step.script.recorded else None
        if known is None:
            complete = False
            echo(f"[check] {step.name}: ARGUMENTS NOT CHECKED: the options of {label} are unknown")
            continue
        mistakes = list(mistakes_of(step.args, known, label))
        lines += [f"{step.name}.args{mistake}" for mistake in mistakes]
        verdict = "WRONG: the arguments are not" if mistakes else "OK: the arguments are"
        source = f" (as recorded from {known.source})" if known.source else ""
        echo(f"[check] {step.name}: {verdict} what {label} accepts{source}")
    if lines:
        raise UnknownArgument("\n".join(lines))
    return complete


def mistakes_of(
    args: Mapping[str, ArgumentValue], known: ScriptOptions, script: str
) -> Iterator[str]:
    """Mistakes in `args`, each a text that continues the YAML path of the arguments."""
    by_name = {name: option for option in known.options for name in option.names}
    check_keys(map(str, args.values()))
    for key, value in args.items():
        if key not in by_name:
            rule: str | None = f"{script} has no --{key}{nearest(key, known.names)}"
        else:
            rule = _broken_rule(value, by_name[key])
        if rule is not None:
            yield f".{key}: {shown(value)}: {rule}"
    given = {name for name, value in args.items() if value is not False}
    for option in known.options:
        if option.required and given.isdisjoint(option.names):
            yield f".{option.names[0]} is missing: {script} requires it"


def _broken_rule(value: ArgumentValue, option: Option) -> str | None:
    if value is False:
        return None
    words = command_line({"": value})[1:]
    rule = _count_rule(len(words), option.nargs)
    if rule is not None and option.choices:
        return f"{rule}: one of {', '.join(option.choices)}"
    for word in words:
        rule = rule or _word_rule(word, option)
    return rule


def _count_rule(count: int, nargs: int | str | None) -> str | None:
    if nargs == 0:
        return "takes no value: leave it empty, or give true or false" if count else None
    if isinstance(nargs, int):
        return None if count == nargs else f"takes {nargs} values, not {count or 'none'}"
    if nargs == "+":
        return None if count else "takes at least one value, not none"
    fits = count <= 1 if nargs == "?" else count == 1
    return None if fits else f"takes one value, not {count or 'none'}"


def _word_rule(word: str, option: Option) -> str | None:
    if word[:1] == "-" and len(word) > 1 and " " not in word and not _NEGATIVE.fullmatch(word):
        return f"{word!r} would be taken for an option, as it starts with a dash"
    if option.type not in (None, "str", *_TYPES):
        return None
    convert, rule = _TYPES.get(option.type or "str", (str, ""))
    try:
        converted = convert(word)
        allowed = None if option.choices is None else [convert(text) for text in option.choices]
    except ValueError:
        return rule
    if allowed is not None and converted not in allowed:
        choices = list(option.choices or ())
        return f"must be one of {', '.join(choices)}{nearest(word, choices)}"
    return None


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
    found = breaches(_facts(plan, plan.config.sm or sm, workspace, echo))
    if not found:
        echo(f"[check] combinations: OK: none of {len(RULES)} rules is broken")
        return
    errors = {breach.error for breach in found}
    error = errors.pop() if len(errors) == 1 else BuildConfigInvalid
    raise error("\n".join(map(str, found)))


def _facts(plan: Plan, sm: int | None, workspace: Workspace, echo: Echo) -> Facts:
    family = PurePosixPath(plan.family).name
    sms = () if family == "openvino" else visible_gpus() if sm is None else (sm,)
    facts = Facts(plan.config, family, tuple(sorted(set(sms))))
    shared = facts.tensor_parallel * facts.stages > 1
    shape = _shape(_model(plan, workspace, echo)) if shared else None
    return Facts(plan.config, family, facts.sms, shape)


def _model(plan: Plan, workspace: Workspace, echo: Echo) -> Mapping[str, Any]:
    """config.json of the model, which ranks share; empty if it is not known."""
    request, reason = plan.config.request, "the model is not here"
    local = expanded(request.model_id) / "config.json"
    if request.model_tar_url is None and local.is_file():
        return json_object(local)
    try:
        here = model_source.locate(request, workspace.models)
        if here is not None:
            return json_object(here.path / "config.json")
        if request.model_tar_url is None:
            from cog_triton.download import hub  # it takes half a second
            from cog_triton.sizing.model_files import config_of

            return config_of(hub.describe(request)[1], request.model_id)
    except ModelUnavailable as error:
        reason = error.detail
    echo(f"[check] combinations: heads and layers are NOT CHECKED: {reason}")
    return {}


def _shape(model: Mapping[str, Any]) -> ModelShape | None:
    try:
        return read_shape(model, "config.json") if model else None
    except BuildConfigInvalid:  # of an architecture that names its sizes otherwise
        return None
