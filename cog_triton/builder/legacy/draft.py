"""A build config while it is being translated: its new arguments, and what is said of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from cog_triton.builder.command_line import ArgumentValue, shown
from cog_triton.builder.config import StepConfig
from cog_triton.builder.legacy.image_paths import relative
from cog_triton.builder.options.recorded import known_options
from cog_triton.errors import nearest

Role = Literal["convert", "build"]
CONVERT = "convert_checkpoint.py"
BUILD = "trtllm-build"
CONVERTED_RANKS = ("tensor_parallelism", "tp", "tp_size")


@dataclass(frozen=True)
class Given:
    """One argument as the config has it; `label` is its YAML path."""

    role: Role
    label: str
    value: ArgumentValue

    def __str__(self) -> str:
        return f"{self.label}: {shown(self.value)}"


@dataclass
class Side:
    """The convert or the build step: as the config has it, and its arguments of today."""

    role: Role
    name: str
    """What the config calls it."""
    step: StepConfig | None
    """None if it is a new one, as build.py also read the model."""
    old: bool
    """Whether it ran a script that is gone."""
    output_dir: str
    given: Mapping[str, Given]
    """The arguments by their names with underscores."""
    args: dict[str, ArgumentValue] = field(default_factory=dict)
    origins: dict[str, Given] = field(default_factory=dict)
    """Where `args` come from."""


@dataclass
class Draft:
    """The steps that are translated, and what is said of them; any other step stays as it is."""

    model_id: str
    family: str
    """The path of the example family, as ``models/core/gpt``."""
    sides: Mapping[Role, Side]
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def old_build(self) -> bool:
        """Whether the build step ran build.py."""
        return self.sides["build"].old

    def value(self, role: Role, *names: str) -> ArgumentValue:
        """What the config gives for the first of the old options `names`; false for nothing."""
        given = self.sides[role].given if role in self.sides else {}
        return next((given[name].value for name in names if name in given), False)

    def number(self, role: Role, *names: str, default: int = 1) -> int:
        """As `value`, if that is a number; else `default`."""
        value = self.value(role, *names)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    @property
    def ranks(self) -> int:
        """How many engines the old steps would have made."""
        parts = self.number("build", "tp_size") * self.number("build", "pp_size")
        converted = self.number("convert", *CONVERTED_RANKS)
        return max(self.number("build", "world_size"), parts, converted)

    def keep(self, given: Given, name: str) -> None:
        """Leave an argument as it is."""
        self._set(given, self.sides[given.role], name, given.value)

    def move(
        self, given: Given, role: Role, name: str, value: ArgumentValue, why: str = ""
    ) -> None:
        """Let `given` become the argument `name` of a step."""
        side = self.sides.get(role)
        if side is None:
            self.refuse(given, f"{name} is for the convert step now, and this config has none")
            return
        options = self._options(role)
        if options is not None and name not in options:
            script = f"{self.family}/{CONVERT}" if role == "convert" else BUILD
            self.refuse(given, f"{script} has no --{name}{nearest(name, options)}")
            return
        if not self._set(given, side, name, value):
            return
        target = name if role == given.role else f"{side.name}.args.{name}"
        because = f" ({why})" if why else ""
        if value != given.value:
            self.notes.append(f"{given} -> {target}: {shown(value)}{because}")
        elif given.label != f"{side.name}.args.{target}":
            self.notes.append(f"{given.label} -> {target}{because}")

    def drop(self, given: Given, why: str) -> None:
        """Leave `given` out."""
        self.notes.append(f"{given}: left out: {why}")

    def refuse(self, given: Given, why: str) -> None:
        """Say why `given` cannot be translated."""
        self.refusals.append(f"{given}: cannot be translated: {why}")

    def add(self, role: Role, name: str, value: ArgumentValue, why: str) -> None:
        """Give an argument that the config left to the old script, unless it is there."""
        side = self.sides[role]
        if name not in side.args:
            side.args[name] = value
            self.notes.append(f"{side.name}.args.{name}: {shown(value)}: added: {why}")

    def is_converted(self, path: str) -> bool:
        """Whether `path` is what the old convert step wrote: it appended ``<ranks>-gpu``."""
        out_dir = self.value("convert", "out_dir", "o")
        roots = [self.sides["convert"].output_dir, *([out_dir] if isinstance(out_dir, str) else [])]
        ranks = self.number("convert", *CONVERTED_RANKS)
        wanted = PurePosixPath(relative(path))
        return any(
            wanted in (root, root / f"{ranks}-gpu")
            for root in (PurePosixPath(relative(text)) for text in roots)
        )

    def _set(self, given: Given, side: Side, name: str, value: ArgumentValue) -> bool:
        origin = side.origins.setdefault(name, given)
        if origin is given:
            side.args[name] = value
        elif side.args[name] == value:
            self.drop(given, f"{origin.label} says it already")
        else:
            self.refuse(given, f"{origin} says otherwise")
        return origin is given

    def _options(self, role: Role) -> list[str] | None:
        """All options of the script of today, if they are recorded."""
        known = known_options(f"{self.family}/{CONVERT}" if role == "convert" else BUILD)
        if known is None or not known.options.complete:
            return None
        return [text for option in known.options.options for text in option.names]
