"""Translation draft: the new arguments of a legacy config, with notes and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from cog_triton.builder.arguments import ArgumentValue, relative, shown
from cog_triton.builder.config import StepConfig
from cog_triton.builder.options.recorded import known_options
from cog_triton.errors import nearest

Role = Literal["convert", "quantize", "build"]
CONVERT = "convert_checkpoint.py"
QUANTIZE = "quantization/quantize.py"
BUILD = "trtllm-build"
VARIANTS = ("gpt_variant",)
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
class StepDraft:
    """A step: as the config has it, and its new arguments."""

    role: Role
    name: str
    """Its key in the config."""
    source: StepConfig | None
    """None if the step is new: build.py also converted the model."""
    legacy: bool
    """Whether it ran a script that no longer exists."""
    output_dir: str
    given: Mapping[str, Given]
    """The arguments by their names with underscores."""
    args: dict[str, ArgumentValue] = field(default_factory=dict)
    origins: dict[str, Given] = field(default_factory=dict)
    """The given argument behind each of `args`."""


@dataclass
class Draft:
    """A translation in progress: the steps concerned, notes, and refusals; other steps stay."""

    model_id: str
    family: str
    """The path of the example family, as ``models/core/gpt``."""
    steps: Mapping[Role, StepDraft]
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def legacy_build(self) -> bool:
        """Whether the build step ran build.py."""
        return self.steps["build"].legacy

    def value(self, role: Role, *names: str) -> ArgumentValue:
        """What the config gives for the first of the legacy options `names`; false for nothing."""
        given = self.steps[role].given if role in self.steps else {}
        return next((given[name].value for name in names if name in given), False)

    def number(self, role: Role, *names: str, default: int = 1) -> int:
        """As `value`, if that is a number; else `default`."""
        value = self.value(role, *names)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    @property
    def ranks(self) -> int:
        """Ranks of the engine that the legacy steps would have made."""
        parts = self.number("build", "tp_size") * self.number("build", "pp_size")
        converted = self.number("convert", *CONVERTED_RANKS)
        return max(self.number("build", "world_size"), parts, converted)

    def keep(self, given: Given, name: str) -> None:
        """Keep an argument unchanged."""
        self._set(given, self.steps[given.role], name, given.value)

    def move(
        self, given: Given, role: Role, name: str, value: ArgumentValue, why: str = ""
    ) -> None:
        """Turn `given` into the argument `name` of a step."""
        step = self.steps.get(role)
        if step is None:
            self.refuse(given, f"{name} is for the convert step now, and this config has none")
            return
        options = self._options(role)
        if options is not None and name not in options:
            self.refuse(given, f"{self._script(role)} has no --{name}{nearest(name, options)}")
            return
        if not self._set(given, step, name, value):
            return
        target = name if role == given.role else f"{step.name}.args.{name}"
        because = f" ({why})" if why else ""
        if value != given.value:
            self.notes.append(f"{given} -> {target}: {shown(value)}{because}")
        elif given.label != f"{step.name}.args.{target}":
            self.notes.append(f"{given.label} -> {target}{because}")

    def drop(self, given: Given, why: str) -> None:
        """Leave `given` out."""
        self.notes.append(f"{given}: left out: {why}")

    def refuse(self, given: Given, why: str) -> None:
        """Note that `given` cannot be translated, and why."""
        self.refusals.append(f"{given}: cannot be translated: {why}")

    def add(self, role: Role, name: str, value: ArgumentValue, why: str) -> None:
        """Add an argument that the config left to the legacy script, unless it is given."""
        step = self.steps[role]
        if name not in step.args:
            step.args[name] = value
            self.notes.append(f"{step.name}.args.{name}: {shown(value)}: added: {why}")

    def is_converted(self, path: str) -> bool:
        """Whether `path` is what the legacy convert step wrote: it appended ``<ranks>-gpu``."""
        out_dir = self.value("convert", "out_dir", "o")
        roots = [self.steps["convert"].output_dir, *([out_dir] if isinstance(out_dir, str) else [])]
        ranks = self.number("convert", *CONVERTED_RANKS)
        wanted = PurePosixPath(relative(path))
        return any(
            wanted in (root, root / f"{ranks}-gpu")
            for root in (PurePosixPath(relative(text)) for text in roots)
        )

    def _set(self, given: Given, step: StepDraft, name: str, value: ArgumentValue) -> bool:
        origin = step.origins.setdefault(name, given)
        if origin is given:
            step.args[name] = value
        elif step.args[name] == value:
            self.drop(given, f"{origin.label} says it already")
        else:
            self.refuse(given, f"{origin} says otherwise")
        return origin is given

    def variants(self) -> dict[str, list[str]]:
        """The convert script's options for the variant of a model: their values, longest first."""
        known = known_options(f"{self.family}/{CONVERT}")
        options = known.options.options if known is not None else ()
        return {
            name: sorted(option.choices or (), key=len, reverse=True)
            for option in options
            for name in option.names
            if name in VARIANTS
        }

    def has(self, role: Role, name: str) -> bool:
        """Whether today's script is known to have `name`, which has underscores for its dashes."""
        return name in {option.replace("-", "_") for option in self._options(role) or ()}

    def _script(self, role: Role) -> str:
        return {"convert": f"{self.family}/{CONVERT}", "quantize": QUANTIZE, "build": BUILD}[role]

    def _options(self, role: Role) -> list[str] | None:
        """All options of today's script; None if they are not recorded."""
        known = known_options(self._script(role))
        if known is None or not known.options.complete:
            return None
        return [text for option in known.options.options for text in option.names]
