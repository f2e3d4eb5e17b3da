"""Comparison of the options that a tree's scripts have with those that are recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from upstream import script_runs
from upstream.installation import Installation

from cog_triton.builder.options.script_options import Option, Options, Unreadable, known_options
from cog_triton.builder.plan import Families
from cog_triton.errors import UserError

COMMAND = "trtllm-build"
_FIELDS = ("nargs", "type", "choices", "required", "default")


@dataclass(frozen=True)
class ScriptOptions:
    """Options of a script in a tree, or why they cannot be read, and the name of its record."""

    script: str
    recorded_as: str | None
    found: Options | Unreadable

    def differences(self) -> list[str]:
        """What differs from the record: options that only one has, fields that are not equal."""
        known = None if self.recorded_as is None else known_options(self.recorded_as)
        if known is None or isinstance(self.found, Unreadable):
            return []
        theirs, ours = _by_name(self.found), _by_name(known.options)
        lines = [f"+{name}" for name in theirs if name not in ours]
        lines += [f"-{name}" for name in ours if name not in theirs]
        for name in theirs.keys() & ours.keys():
            for field in _FIELDS:
                was, now = getattr(ours[name], field), getattr(theirs[name], field)
                if was != now:
                    lines.append(f"{name}.{field}: recorded {was}, here {now}")
        return sorted(lines)


def read(tree: Installation, output: Path) -> list[ScriptOptions]:
    """Read the options of all scripts of `tree` by their own argparse."""
    paths = {name: tree.sources / "examples" / name for name in tree.scripts}
    paths[COMMAND] = tree.python.parent / COMMAND
    found = script_runs.read_options(tree, [*paths.values()], output / "options")
    return [
        ScriptOptions(name, _recorded_as(name), options)
        for name, options in zip(paths, found, strict=True)
    ]


def _recorded_as(script: str) -> str | None:
    """The record of the family that has the name of `script`'s."""
    if known_options(script) is not None:
        return script
    path = PurePosixPath(script)
    try:
        found = f"{Families().find(path.parent.name)}/{path.name}"
    except UserError:
        return None
    return found if known_options(found) is not None else None


def _by_name(options: Options) -> dict[str, Option]:
    return {option.names[0]: option for option in options.options if option.names}
