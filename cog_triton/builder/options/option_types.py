"""Option types: what a build script accepts on its command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One option; `nargs`, `required` and `default` as in argparse, 0 being a bare flag."""

    names: tuple[str, ...]
    """Its long names without dashes, as a config writes them; empty if it has none."""
    label: str
    """What to call it if it has no name."""
    nargs: int | str | None = None
    type: str | None = None
    """``str``, ``int`` or ``float``, None for argparse's default; anything else is the script's
    own, and only the script can say what it accepts."""
    choices: tuple[str, ...] | None = None
    required: bool = False
    default: str | None = None


@dataclass(frozen=True)
class Options:
    """All that a script accepts.

    `complete` is false if it also takes, and passes on or drops, what is not here;
    `abbreviations` if it takes the unique beginning of a name for the name.
    """

    options: tuple[Option, ...]
    positionals: tuple[Option, ...] = ()
    complete: bool = True
    abbreviations: bool = False


@dataclass(frozen=True)
class Unreadable:
    """Why a script's options are not known."""

    reason: str
