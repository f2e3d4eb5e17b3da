"""Checks before anything runs: a plan's arguments, and what does not go together."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

from cog_triton.builder import breaches
from cog_triton.builder.arguments import ArgumentValue, command_line, shown
from cog_triton.builder.breaches import Broken, Facts, Version, installed_version
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.options.script_options import (
    LIMIT_S,
    Option,
    Options,
    Unreadable,
    known_options,
    probing,
)
from cog_triton.builder.plan import Plan, Script, Step
from cog_triton.builder.workspace import Echo, Workspace
from cog_triton.download import model_source
from cog_triton.download.model_request import json_object
from cog_triton.errors import (
    BuildConfigInvalid,
    EngineIncompatible,
    ModelUnavailable,
    UnknownArgument,
    UnknownExample,
    UserError,
    nearest,
)
from cog_triton.removed import check_keys
from cog_triton.sizing.memory_sum import ModelShape, read_shape
from cog_triton.system.gpus import visible_gpus
from cog_triton.system.paths import expanded

_ERRORS: dict[str, type[UserError]] = {
    error.code: error
    for error in (BuildConfigInvalid, EngineIncompatible, ModelUnavailable, UnknownExample)
}
_TYPES: dict[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "must be a whole number"),
    "float": (float, "must be a number"),
}
# Fewest and most values by nargs; what is not listed takes any number.
_COUNTS: dict[str | None, tuple[int, int | None]] = {
    None: (1, 1),
    "?": (0, 1),
    "+": (1, None),
    "A...": (1, None),
}
# What argparse takes as a value although it starts with a dash.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


_Version = Annotated[Version | None, BeforeValidator(_version)]


class Rule(BaseModel):
    """One rule; see the head of combinations.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    what: str
    why: str
    source: str
    since: _Version = None
    until: _Version = None
    error: str = BuildConfigInvalid.code
    engines: bool = False
    clashes: tuple[breaches.Clash, ...] = ()
    kernels: tuple[breaches.Kernel, ...] = ()
    code: str | None = None

    @property
    def error_type(self) -> type[UserError]:
        """What a breach raises."""
        return _ERRORS[self.error]

    @property
    def versions(self) -> str:
        """The versions of TensorRT-LLM that it is for, in words."""
        first, last = (v and f"{v[0]}.{v[1]}" for v in (self.since, self.until))
        return f"since {first}" if first else f"until {last}" if last else "all"

    def broken(self, facts: Facts) -> Iterator[Broken]:
        """What breaks it."""
        if not (self.since or facts.version) <= facts.version <= (self.until or facts.version):
            return
        for clash in self.clashes:
            yield from breaches.clash(facts, clash)
        for kernel in self.kernels:
            yield from breaches.kernel(facts, kernel)
        if self.code is not None:
            find: Callable[[Facts], Iterator[Broken]] = getattr(breaches, self.code)
            yield from find(facts)

    def line(self, broken: Broken) -> str:
        """What a user reads of a breach: value, rule, and the nearest value that holds."""
        return f"{broken} ({self.name}: {self.why})"


@functools.cache
def rules() -> tuple[Rule, ...]:
    """All rules, in the order of their table."""
    text = (resources.files(__package__) / "combinations.yaml").read_text("utf-8")
    read = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(Rule.model_validate(rule) for rule in read)


def breaches_of(facts: Facts) -> Iterator[tuple[Rule, Broken]]:
    """Every breach, with its rule."""
    for rule in rules():
        for broken in rule.broken(facts):
            yield rule, broken


def check_family(config: BuildConfig, family: str) -> None:
    """Refuse a family whose engines are not served, before its arguments are looked at.

    Raises:
        UnknownExample: names it, and the reason.
    """
    for rule, broken in breaches_of(Facts(config, PurePosixPath(family).name)):
        if rule.error_type is UnknownExample:
            raise UnknownExample(rule.line(broken))


def markdown() -> str:
    """The table of docs/build.md."""
    rows = ["| rule | what holds | TensorRT-LLM | why | source |", "|---|---|---|---|---|"]
    rows += [f"| {r.name} | {r.what} | {r.versions} | {r.why} | {r.source} |" for r in rules()]
    return "\n".join(rows) + "\n"


def check_arguments(
    steps: Sequence[Step],
    echo: Callable[[str], None],
    limit_s: float = LIMIT_S,
    *,
    against_installed: bool | None = None,
) -> bool:
    """Check the arguments of `steps` against the options that their scripts have.

    Args:
        echo: gets a line for each step, which says what its options were read from, or that its
            arguments could not be checked.
        limit_s: time limit of a script that is asked for its options, in seconds.
        against_installed: ask the scripts of this machine themselves, which are run as far as
            their command line; if False only those of which nothing is recorded; if left out,
            where a script is not installed, what is recorded of it will do.

    Returns:
        Whether all could be checked.

    Raises:
        UnknownArgument: one line for each mistake of each step: YAML path, value and rule.
    """
    lines: list[str] = []
    complete = True
    with contextlib.ExitStack() as stack:
        # All at once: most of the time goes into the scripts' imports.
        waits = [
            stack.enter_context(_probed(step.script, limit_s, against_installed)) for step in steps
        ]
        for step, wait in zip(steps, waits, strict=True):
            found = wait()
            label = PurePosixPath(step.script.name).name
            if isinstance(found, Unreadable):
                complete = False
                echo(f"[check] {step.name}: ARGUMENTS NOT CHECKED: {label}: {found.reason}")
                continue
            mistakes = list(mistakes_of(step.args, found.options, label))
            lines += [f"{step.name}.args{mistake}" for mistake in mistakes]
            unlisted = [] if found.options.complete else _unlisted(step.args, found.options)
            if unlisted:
                complete = False
                echo(
                    f"[check] {step.name}: ARGUMENTS NOT CHECKED: {', '.join(unlisted)}: {label}"
                    " also takes options that it does not list"
                )
            verdict = "OK: the arguments are" if not mistakes else "WRONG: the arguments are not"
            if mistakes or not unlisted:
                echo(f"[check] {step.name}: {verdict} what {label} accepts{found.source}")
    if lines:
        raise UnknownArgument("\n".join(lines))
    return complete


@dataclass(frozen=True)
class _Found:
    """Options, and in brackets their source if that is not the script itself."""

    options: Options
    source: str = ""


@contextlib.contextmanager
def _probed(
    script: Script, limit_s: float, against_installed: bool | None
) -> Iterator[Callable[[], _Found | Unreadable]]:
    """Start a probe of `script`; what this yields waits for its options, probed or recorded."""
    by_record = against_installed is False and script.recorded
    recorded = known_options(script.name) if by_record else None
    if recorded is not None:
        yield lambda: _Found(recorded.options, f" (as recorded from {recorded.source})")
    elif script.problem:
        absent = Unreadable(script.problem)
        yield lambda: absent if against_installed else _recorded_or(absent, script)
    else:
        with probing(script.python, script.path, limit_s) as wait:

            def found() -> _Found | Unreadable:
                options = wait()
                if isinstance(options, Unreadable):
                    return _recorded_or(options, script)
                return _Found(options)

            yield found


def _recorded_or(unreadable: Unreadable, script: Script) -> _Found | Unreadable:
    known = known_options(script.name)
    if known is None or not script.recorded:
        return unreadable
    why = f"; it could not be asked: {unreadable.reason}" if not script.problem else ""
    return _Found(known.options, f" (as recorded from {known.source}{why})")


def _unlisted(args: Mapping[str, ArgumentValue], options: Options) -> list[str]:
    return [key for key in args if not _named(key, options)]


def mistakes_of(args: Mapping[str, ArgumentValue], options: Options, script: str) -> Iterator[str]:
    """Mistakes in `args`, each a text that continues the YAML path of the arguments."""
    given: list[Option] = []
    check_keys(map(str, args.values()))
    for key, value in args.items():
        matches = _named(key, options)
        if len(matches) == 1:
            rule = _abbreviation(key, matches[0], script) or _broken_rule(value, matches[0])
            given += [] if value is False else matches
        elif matches:
            names = ", ".join(match.names[0] for match in matches)
            rule = f"{script} cannot tell which one is meant: {names}"
        elif options.complete:
            known = [name for option in options.options for name in option.names]
            rule = f"{script} has no --{key}{nearest(key, known)}"
        else:
            rule = None
        if rule is not None:
            yield f".{key}: {shown(value)}: {rule}"
    for option in options.options:
        if option.required and option not in given:
            if option.names:
                yield f".{option.names[0]} is missing: {script} requires it"
            else:
                yield f": {script} requires {option.label}, and a config can give --name only"
    for option in options.positionals:
        if option.required:
            yield f": {script} requires {option.label} without a name, and a config has names only"


def _named(key: str, options: Options) -> list[Option]:
    """The option named `key`, or all those that it may abbreviate."""
    exact = [option for option in options.options if key in option.names]
    if exact or not options.abbreviations:
        return exact
    return [o for o in options.options if any(name.startswith(key) for name in o.names)]


def _abbreviation(key: str, option: Option, script: str) -> str | None:
    """Rule that names are whole: what is short for one option now may be for two in a release."""
    if key in option.names:
        return None
    meant = next(name for name in option.names if name.startswith(key))
    return f"{script} would take it for --{meant}: write {meant}"


def _broken_rule(value: ArgumentValue, option: Option) -> str | None:
    if value is False:
        return None
    words = command_line({"": value})[1:]
    rule = _count_rule(len(words), option.nargs)
    if rule is not None and option.choices:
        return f"{rule}: one of {', '.join(option.choices)}"
    if rule is None and option.nargs != "...":
        for word in words:
            rule = rule or _word_rule(word, option)
    return rule


def _count_rule(count: int, nargs: int | str | None) -> str | None:
    if nargs == 0:
        return "takes no value: leave it empty, or give true or false" if count else None
    low, high = (nargs, nargs) if isinstance(nargs, int) else _COUNTS.get(nargs, (0, None))
    if count < low or (high is not None and count > high):
        wanted = "at least one value" if high is None else "one value" if high == 1 else None
        return f"takes {wanted or f'{high} values'}, not {count or 'none'}"
    return None


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
    facts = _facts(plan, plan.config.sm or sm, workspace, echo)
    found = list(breaches_of(facts))
    if not found:
        echo(f"[check] combinations: OK: none of {len(rules())} rules is broken")
        return
    errors = {rule.error_type for rule, _ in found}
    error = errors.pop() if len(errors) == 1 else BuildConfigInvalid
    raise error("\n".join(rule.line(broken) for rule, broken in found))


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
    local = expanded(request.model_id) / "config.json"
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
