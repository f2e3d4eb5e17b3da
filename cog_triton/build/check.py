"""The arguments of a build config against the options of its scripts, before anything runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping

from cog_triton.build.arguments import ArgumentValue, command_line
from cog_triton.build.config import BuildConfig
from cog_triton.build.options import Option, Options, Unreadable
from cog_triton.build.plan import Plan
from cog_triton.build.script_options import LIMIT_S, reading
from cog_triton.errors import UnknownArgument, nearest

_SHOWN_LENGTH = 120
_TYPES: dict[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "must be a whole number"),
    "float": (float, "must be a number"),
}
# The fewest and the most values; whatever is not here takes any number.
_COUNTS: dict[str | None, tuple[int, int | None]] = {
    None: (1, 1),
    "?": (0, 1),
    "+": (1, None),
    "A...": (1, None),
}
# What argparse takes for a value although it starts with a dash.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


def check_arguments(
    config: BuildConfig, plan: Plan, echo: Callable[[str], None], limit_s: float = LIMIT_S
) -> None:
    """Check the arguments of all steps of `plan`, which is `config`'s.

    `echo` gets a line for each step, which says so if its arguments could not be checked.

    Raises:
        UnknownArgument: one line for each mistake of each step: YAML path, value and rule.
    """
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        # All at once: most of the time goes into the scripts' imports.
        waits = [
            stack.enter_context(reading(step.argv[0], step.script, limit_s)) for step in plan.steps
        ]
        for (name, step), wait in zip(config.steps(), waits, strict=True):
            found = wait()
            if isinstance(found, Unreadable):
                echo(f"[check] {name}: ARGUMENTS NOT CHECKED: {step.script}: {found.reason}")
                continue
            mistakes = list(mistakes_of(step.args, found, step.script))
            lines += [f"{name}.args{mistake}" for mistake in mistakes]
            if not mistakes:
                echo(f"[check] {name}: {_verdict(step.args, found, step.script)}")
    if lines:
        raise UnknownArgument("\n".join(lines))


def _verdict(args: Mapping[str, ArgumentValue], options: Options, script: str) -> str:
    unknown = [key for key in args if not _named(key, options)]
    if not unknown:
        return f"OK: the arguments are what {script} accepts"
    return (
        f"ARGUMENTS NOT CHECKED: {', '.join(unknown)}: {script} also takes options that it does"
        " not list"
    )


def mistakes_of(args: Mapping[str, ArgumentValue], options: Options, script: str) -> Iterator[str]:
    """What is wrong with `args`, each to be read after the YAML path of the arguments."""
    given: list[Option] = []
    for key, value in args.items():
        matches = _named(key, options)
        if len(matches) == 1:
            rule = _broken_rule(value, matches[0])
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
            yield f".{key}: {_shown(value)}: {rule}"
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
    """The option called `key`, or all those that it may be short for."""
    exact = [option for option in options.options if key in option.names]
    if exact or not options.abbreviations:
        return exact
    return [o for o in options.options if any(name.startswith(key) for name in o.names)]


def _broken_rule(value: ArgumentValue, option: Option) -> str | None:
    if value is False:
        return None
    words = command_line({"": value})[1:]
    rule = _count_rule(len(words), option.nargs)
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


def _shown(value: ArgumentValue) -> str:
    if value is None or isinstance(value, bool):
        return {None: "no value", True: "true", False: "false"}[value]
    return repr(value)[:_SHOWN_LENGTH]
