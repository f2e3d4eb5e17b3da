"""Rule kinds for legacy options, and the rules that need code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from cog_triton.builder.arguments import MODEL, ArgumentValue, relative, resolved
from cog_triton.builder.legacy.translation_draft import CONVERTED_RANKS, Draft, Given, Role

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
        """Translate `given` in `draft`."""
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
        """Translate `given` in `draft`."""
        if self.values is None or _among(given.value, self.values):
            draft.drop(given, self.why)
        else:
            draft.refuse(given, self.why)

    def text(self, _name: str, _role: Role) -> str:
        """As for `Moved`."""
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
        """Translate `given` in `draft`."""
        draft.refuse(given, self.why)

    def text(self, _name: str, _role: Role) -> str:
        """As for `Moved`."""
        return f"refused: {self.why}"


@dataclass(frozen=True)
class Derived:
    """Rule: the translation depends on other arguments."""

    says: str
    apply: Callable[[Draft, Given], None]

    def text(self, _name: str, _role: Role) -> str:
        """As for `Moved`."""
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
