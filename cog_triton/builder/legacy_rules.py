"""Rules of legacy options: their kinds, those that need code, and the steps that they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from cog_triton.builder.arguments import MODEL, ArgumentValue, relative, resolved, shown
from cog_triton.builder.config import StepConfig
from cog_triton.builder.options.script_options import known_options
from cog_triton.errors import nearest

Role = Literal["convert", "quantize", "build"]
CONVERT = "convert_checkpoint.py"
QUANTIZE = "quantization/quantize.py"
BUILD = "trtllm-build"
VARIANTS = ("gpt_variant",)
CONVERTED_RANKS = ("tensor_parallelism", "tp", "tp_size")
DEFAULTS = {
    "gpt": (256, 200, 200),
    "llama": (8, 2048, 512),
    "internlm": (8, 2048, 512),
    "baichuan": (1, 1024, 1024),
    "gptj": (256, 200, 200),
    "gptneox": (64, 1024, 1024),
    "mpt": (256, 200, 200),
    "phi": (64, 1024, 1024),
}
"""max_batch_size, max_input_len and max_output_len of each family's build.py in 0.7.1."""
NEW_DEFAULTS = (2048, 1024)
"""max_batch_size and max_input_len of trtllm-build since 0.14; max_seq_len is the model's own."""
ON = (None, True, "enable")
OFF = ("disable",)


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


@dataclass(frozen=True)
class Change:
    """Change of a value; `function` raises ValueError with the reason for one that cannot be."""

    says: str
    function: Callable[[ArgumentValue], ArgumentValue]


@dataclass(frozen=True)
class Moved:
    """Rule: the option has another name, step or value today."""

    role: Role
    name: str
    change: Change | None = None

    def apply(self, draft: Draft, given: Given) -> None:
        try:
            value = given.value if self.change is None else self.change.function(given.value)
        except ValueError as error:
            draft.refuse(given, str(error))
        else:
            draft.move(given, self.role, self.name, value)

    def text(self, name: str, role: Role) -> str:
        """What docs/build.md says of `name`, an option of the step `role`."""
        today = "the same" if name == self.name else f"`{self.name}`"
        step = "" if role == self.role else f" in the {self.role} step"
        return f"{today}{step}{f': {self.change.says}' if self.change else ''}"


@dataclass(frozen=True)
class Dropped:
    """Rule: the option is left out; `values` are those that this holds for, if not for all."""

    why: str
    values: tuple[ArgumentValue, ...] | None = None

    def apply(self, draft: Draft, given: Given) -> None:
        if self.values is None or _among(given.value, self.values):
            draft.drop(given, self.why)
        else:
            draft.refuse(given, self.why)

    def text(self, _name: str, _role: Role) -> str:
        if self.values is None:
            return f"left out: {self.why}"
        words: dict[tuple[ArgumentValue, ...], str] = {OFF: "off", ON: "on"}
        state = words.get(self.values) or ", ".join(map(str, self.values))
        return f"left out if it is {state}, else refused: {self.why}"


@dataclass(frozen=True)
class Refused:
    """Rule: the option is refused, as nothing in a config means the same today."""

    why: str

    def apply(self, draft: Draft, given: Given) -> None:
        draft.refuse(given, self.why)

    def text(self, _name: str, _role: Role) -> str:
        return f"refused: {self.why}"


@dataclass(frozen=True)
class Derived:
    """Rule: the translation depends on other arguments."""

    says: str
    apply: Callable[[Draft, Given], None]

    def text(self, _name: str, _role: Role) -> str:
        return self.says


Rule = Moved | Dropped | Refused | Derived


def _among(value: ArgumentValue, values: tuple[ArgumentValue, ...]) -> bool:
    """Whether `value` is one of `values`, 1 not being true."""
    return any(type(value) is type(other) and value == other for other in values)


def _plugin(value: ArgumentValue) -> ArgumentValue:
    return "auto" if value is None or value is True else value


def _word(value: ArgumentValue) -> ArgumentValue:
    if value is False:
        return "disable"
    return "enable" if value is None or value is True else value


def _kv_cache(value: ArgumentValue) -> ArgumentValue:
    if not _among(value, (*ON, False, *OFF)):
        raise ValueError("it is enable or disable")
    return "paged" if _among(value, ON) else "continuous"


def _dtype(value: ArgumentValue) -> ArgumentValue:
    names = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
    return names.get(value, value) if isinstance(value, str) else value


def _weights(value: ArgumentValue) -> ArgumentValue:
    if value == "int4_awq":
        raise ValueError("AWQ checkpoints come from quantize.py with qformat int4_awq")
    return value


def _safetensors(value: ArgumentValue) -> ArgumentValue:
    if not isinstance(value, str) or not value.endswith(".safetensors"):
        raise ValueError("only a .safetensors file can be read today")
    return value


PLUGIN = Change("`auto`, the model's own type, if it has no value", _plugin)
WORD = Change("`enable`; `disable` for `false`", _word)
PAGED = Change("`paged`; `continuous` if off", _kv_cache)
DTYPE = Change("`fp16` is `float16` today", _dtype)
WEIGHTS = Change("`int4_awq` is refused", _weights)
SAFETENSORS = Change("a .safetensors file", _safetensors)


def max_output_len(draft: Draft, given: Given) -> None:
    """Rule: with max_input_len it is max_seq_len today."""
    defaults = DEFAULTS.get(PurePosixPath(draft.family).name, (0, 0, 0))
    default = defaults[1] if draft.legacy_build else NEW_DEFAULTS[1]
    longest = draft.number("build", "max_input_len", default=default)
    if not isinstance(given.value, int) or isinstance(given.value, bool) or not longest:
        draft.refuse(given, "max_seq_len is its sum with max_input_len: give both as numbers")
        return
    if draft.legacy_build and draft.value("build", "max_input_len") is False:
        draft.add("build", "max_input_len", longest, "the default of build.py")
    why = f"max_input_len {longest} + max_output_len {given.value}"
    draft.move(given, "build", "max_seq_len", longest + given.value, why)


def output_dir(draft: Draft, given: Given) -> None:
    """Rule: the directory is output_dir of the step."""
    declared, value = draft.steps[given.role].output_dir, given.value
    same = isinstance(value, str) and PurePosixPath(relative(value)) == PurePosixPath(
        relative(declared)
    )
    draft.move(
        given, given.role, "output_dir", value if same else declared, "output_dir of the step"
    )


def model_dir(draft: Draft, given: Given) -> None:
    """Rule: it is the output of the convert step, or the model itself."""
    value, convert = given.value, draft.steps["convert"]
    if not isinstance(value, str):
        draft.refuse(given, "it is a directory")
    elif convert.source is not None:
        if draft.is_converted(value):
            draft.move(given, "build", "checkpoint_dir", convert.output_dir)
        else:
            draft.refuse(given, f"{convert.name}.output_dir is {convert.output_dir!r}")
    elif resolved(value, draft.model_id, MODEL) == MODEL or relative(value).startswith("/"):
        draft.move(given, "convert", "model_dir", value)
    else:
        draft.refuse(given, "it is not the model, and no step before build writes it")


def world_size(draft: Draft, given: Given) -> None:
    """Rule: tensor parallelism, which is all that build.py of gpt has."""
    product = draft.number("build", "tp_size") * draft.number("build", "pp_size")
    if draft.value("build", "tp_size", "pp_size") is False:
        draft.move(given, "convert", "tp_size", given.value)
    elif given.value == product:
        draft.drop(given, "tp_size and pp_size say it")
    else:
        draft.refuse(given, "it is not tp_size times pp_size")


def moe_tp_mode(draft: Draft, given: Given) -> None:
    """Rule: 1 put whole experts on each rank, and 2, the default, a part of every one."""
    if given.value == 2:
        draft.drop(given, "every rank has a part of each expert, as by default")
    elif given.value == 1:
        ranks = draft.number("convert", *CONVERTED_RANKS)
        draft.move(given, "convert", "moe_ep_size", ranks, "each rank has whole experts")
    else:
        draft.refuse(given, "it is 1, whole experts on each rank, or 2, a part of every one")


def weight_data_type(draft: Draft, given: Given) -> None:
    """Rule: enc_dec had it beside dtype, which decides."""
    if draft.value("convert", "dtype") is False:
        draft.move(given, "convert", "dtype", _dtype(given.value))
    else:
        draft.drop(given, "dtype decides: it was the type that weights were read in")


def fixed_num_medusa_heads(draft: Draft, given: Given) -> None:
    """Rule: it came before num_medusa_heads, which is the model's own number no longer."""
    other = draft.value("convert", "num_medusa_heads")
    if other in (False, given.value):
        draft.move(given, "convert", "num_medusa_heads", given.value)
    else:
        draft.refuse(given, f"it came before num_medusa_heads {other}: give that alone")


def parallel_build(draft: Draft, given: Given) -> None:
    """Rule: one worker process for each rank."""
    if draft.ranks > 1:
        draft.move(given, "build", "workers", draft.ranks, "one for each rank")
    else:
        draft.drop(given, "the engine has one rank")


def smoothquant(draft: Draft, given: Given) -> None:
    """Rule: the weights were smoothed, but only the build step's flag made the engine use it."""
    if draft.legacy_build and draft.value("build", "use_smooth_quant") is False:
        draft.refuse(given, "build.args has no use_smooth_quant, so the engine was not quantized")
    else:
        draft.move(given, "convert", "smoothquant", given.value)


def use_smooth_quant(draft: Draft, given: Given) -> None:
    """Rule: the convert step does all of it today."""
    if draft.value("convert", "smoothquant", "sq") is not False:
        draft.drop(given, "smoothquant of the convert step does it")
    else:
        draft.refuse(given, "the convert step needs smoothquant, a number from 0 to 1")


def calibrate_kv_cache(draft: Draft, given: Given) -> None:
    """Rule: scales were made, but only the build step's flag made the engine use them."""
    if draft.legacy_build:
        draft.drop(given, "int8_kv_cache of the build step decides, and calibrates")
    else:
        draft.move(given, "convert", "int8_kv_cache", given.value)
