"""Command line of a step: each value of an argument in a build config has one meaning there."""

from __future__ import annotations

from collections.abc import Mapping

Scalar = int | float | str
ArgumentValue = bool | Scalar | list[Scalar] | None

_SHOWN_LENGTH = 120


def command_line(args: Mapping[str, ArgumentValue]) -> list[str]:
    """The words that `args` stand for, in the order given.

    A key without value and ``true`` pass the bare flag ``--key``, ``false`` leaves it out, a
    list passes its items as separate words; anything else, ``0`` and ``""`` included, is a value.
    """
    words: list[str] = []
    for key, value in args.items():
        if value is False:
            continue
        words.append(f"--{key}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif value is not None and value is not True:
            words.append(str(value))
    return words


def shown(value: ArgumentValue) -> str:
    """`value` for a message: one line of limited length."""
    if value is None or isinstance(value, bool):
        return {None: "no value", True: "true", False: "false"}[value]
    return repr(value)[:_SHOWN_LENGTH]
