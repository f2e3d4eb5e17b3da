"""Checks before anything runs: each argument by itself, and ten rules between them.

The rules are for mistakes that would cost hours of a GPU: TensorRT-LLM's scripts take these
arguments one by one, and fail after minutes, or build something else without a word. All other
combinations are left to them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from cog_triton.builder.config import BuildConfig
from cog_triton.builder.plan import Plan, Step
from cog_triton.builder.script_options import (
    ArgumentValue,
    Option,
    Role,
    ScriptOptions,
    command_line,
    known_options,
    shown,
)
from cog_triton.builder.workspace import Echo, Workspace
from cog_triton.download import model_source
from cog_triton.download.model_request import is_hub_id, json_object
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

_NUMBERS: dict[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "must be a whole number"),
    "float": (float, "must be a number"),
}
# What argparse takes as a value although it starts with a dash.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
_RANKS = ("tp_size", "tensor_parallelism", "world_size")
# Numbers that are 1 or more, and those that are 0 or more.
_COUNTS: dict[Role, tuple[str, ...]] = {
    "convert": (*_RANKS, "pp_size", "cp_size", "workers"),
    "quantize": (*_RANKS, "pp_size", "cp_size", "batch_size", "calib_max_seq_length"),
    "build": (
        *("max_batch_size", "max_input_len", "max_seq_len", "max_beam_width", "max_num_tokens"),
        *("opt_num_tokens", "max_encoder_input_len", "tokens_per_block", "max_lora_rank"),
        "workers",
    ),
}
_SIZES = ("max_draft_len", "max_prompt_embedding_table_size")
# An argument, its value unless it is a bare flag, and the first SM that computes in such numbers.
_FIRST_SM: tuple[tuple[Role, str, str | None, int, str], ...] = (
    ("quantize", "qformat", "fp8", 89, "int8_sq"),
    ("quantize", "qformat", "w4a8_awq", 89, "int4_awq"),
    ("quantize", "qformat", "nvfp4", 100, "fp8"),
    ("quantize", "qformat", "int8_sq", 80, "int8_wo"),
    ("quantize", "qformat", "int4_awq", 75, "int4_wo"),
    ("quantize", "kv_cache_dtype", "fp8", 89, "int8"),
    ("quantize", "dtype", "bfloat16", 80, "float16"),
    ("convert", "dtype", "bfloat16", 80, "float16"),
    ("convert", "use_fp8", None, 89, "left out"),
    ("convert", "use_fp8_rowwise", None, 89, "left out"),
    ("convert", "fp8_kv_cache", None, 89, "left out"),
    ("convert", "use_nvfp4", None, 100, "left out"),
    ("build", "use_fp8_context_fmha", None, 89, "disable"),
    ("build", "gemm_plugin", "fp8", 89, "auto"),
    ("build", "gemm_plugin", "nvfp4", 100, "auto"),
)
_KNOWN_SM = (70, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121)
_TWO_ENGINES = "is of encoder-decoder models, which are two engines, and are not built"
_NO_TEXT = {
    **dict.fromkeys(("enc_dec", "whisper"), _TWO_ENGINES),
    **dict.fromkeys(("bert", "dit", "mmdit", "stdit", "vit"), "is no model that generates text"),
}


def check_arguments(steps: Sequence[Step], echo: Echo) -> bool:
    """Check the arguments of `steps` against the recorded options; whether all could be checked.

    `echo` gets a line for each step: what its options were read from, or NOT CHECKED.

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
            rule = None if value is False else _broken_rule(value, by_name[key])
        if rule is not None:
            yield f".{key}: {shown(value)}: {rule}"
    given = {name for name, value in args.items() if value is not False}
    for option in known.options:
        if option.required and given.isdisjoint(option.names):
            yield f".{option.names[0]} is missing: {script} requires it"


def _broken_rule(value: ArgumentValue, option: Option) -> str | None:
    words = command_line({"": value})[1:]
    count, nargs = len(words), option.nargs
    if nargs == 0:
        return "takes no value: leave it empty, or give true or false" if words else None
    least, most, what = {
        None: (1, 1, "one value"),
        "?": (0, 1, "one value"),
        "+": (1, count, "at least one value"),
    }.get(nargs, (nargs, nargs, f"{nargs} values"))  # type: ignore[arg-type]
    if not least <= count <= most:
        choices = f": one of {', '.join(option.choices)}" if option.choices else ""
        return f"takes {what}, not {count or 'none'}{choices}"
    return next(filter(None, (_word_rule(word, option) for word in words)), None)


def _word_rule(word: str, option: Option) -> str | None:
    if word[:1] == "-" and len(word) > 1 and " " not in word and not _NEGATIVE.fullmatch(word):
        return f"{word!r} would be taken for an option, as it starts with a dash"
    if option.type not in (None, "str", *_NUMBERS):
        return None
    convert, rule = _NUMBERS.get(option.type or "str", (str, ""))
    choices = list(option.choices or ())
    try:
        known = convert(word) in map(convert, choices) or not choices
    except ValueError:
        return rule
    return None if known else f"must be one of {', '.join(choices)}{nearest(word, choices)}"


@dataclass(frozen=True)
class Facts:
    """A config of a family, whose engine is for `sms`; `shape` is its model's.

    A rule that needs what is not known, as `sms` is empty or `shape` None, finds nothing.
    """

    config: BuildConfig
    family: str
    sms: tuple[int, ...] = ()
    shape: ModelShape | None = None

    def _step(self, role: Role) -> tuple[str, dict[str, ArgumentValue]]:
        for name, step in self.config.steps():
            if name.startswith(role):
                return name, step.args
        return role, {}

    def label(self, role: Role, name: str) -> str:
        """The YAML path of an option, with dashes if the config has them."""
        key, args = self._step(role)
        written = (n for n in args if n.replace("-", "_") == name)
        return f"{key}.args.{next(written, name)}"

    def args(self, role: Role) -> dict[str, ArgumentValue]:
        """Arguments of a step, with underscores, without those that false leaves out."""
        given = self._step(role)[1]
        return {key.replace("-", "_"): value for key, value in given.items() if value is not False}

    def number(self, role: Role | None, *names: str) -> int | None:
        """What is given for the first of `names` that is a whole number."""
        args = self.args(role) if role else {}
        for value in (args.get(name) for name in names):
            if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    @property
    def checkpoint(self) -> Role | None:
        """The step whose output the engine is built from; None if it is made elsewhere."""
        names = [name for name, _ in self.config.steps()]
        return "quantize" if "quantize" in names else "convert" if len(names) > 1 else None

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share every layer."""
        return self.number(self.checkpoint, *_RANKS) or 1

    @property
    def stages(self) -> int:
        """Ranks that layers are spread over, one after another."""
        return self.number(self.checkpoint, "pp_size") or 1


@dataclass(frozen=True)
class Breach:
    """A broken rule: the YAML path, its value, what must be, and the nearest value that holds."""

    where: str
    value: object
    must: str
    near: object = None
    error: type[UserError] = BuildConfigInvalid

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, bool | int | float | None) else str(self.value)
        near = "" if self.near is None else f"; nearest: {self.near}"
        return f"{self.where}: {shown(value)}: {self.must}{near}"


def _counts(facts: Facts) -> Iterator[Breach]:
    """Sizes, ranks and workers are 1 or more, max_draft_len and prompt tables 0 or more."""
    rows: list[tuple[Role, str, int]] = [("build", name, 0) for name in _SIZES]
    rows[:0] = [(role, name, 1) for role, names in _COUNTS.items() for name in names]
    for role, name, least in rows:
        number = facts.number(role, name)
        if number is not None and number < least:
            yield Breach(facts.label(role, name), number, f"must be {least} or more", least)


def _at_least(facts: Facts, name: str, other: str) -> Iterator[Breach]:
    number, least = facts.number("build", name), facts.number("build", other)
    if number is not None and least is not None and 0 < number < least:
        must = f"must be {other}, {least}, or more"
        yield Breach(facts.label("build", name), number, must, least)


def _sequence(facts: Facts) -> Iterator[Breach]:
    """max_seq_len is max_input_len or more: longer prompts would be cut."""
    return _at_least(facts, "max_seq_len", "max_input_len")


def _batch(facts: Facts) -> Iterator[Breach]:
    """max_num_tokens is max_batch_size or more: else the batch could never be full."""
    args = facts.args("build")
    if args.get("remove_input_padding") != "disable" and "speculative_decoding_mode" not in args:
        yield from _at_least(facts, "max_num_tokens", "max_batch_size")


def _heads(facts: Facts) -> Iterator[Breach]:
    """tp_size divides the model's heads; with llama and qwen it goes with the KV heads, too."""
    role, ranks, shape = facts.checkpoint, facts.tensor_parallel, facts.shape
    if role is None or ranks <= 1 or shape is None:
        return
    shared = shape.kv_heads if facts.family in ("llama", "qwen") else 1
    fits = [
        n
        for n in range(1, min(shape.heads, 1024) + 1)
        if not shape.heads % n and not (shared % n and n % shared)
    ]
    if ranks not in fits:
        name = next((n for n in _RANKS[1:] if n in facts.args(role)), "tp_size")
        kv = f", and its {shared} KV heads divide it or it them" if shared > 1 else ""
        must = f"must divide the model's {shape.heads} heads{kv}"
        near = min(fits, key=lambda n: (abs(n - ranks), n))
        yield Breach(facts.label(role, name), ranks, must, near)


def _layers(facts: Facts) -> Iterator[Breach]:
    """pp_size is the number of layers at most: each stage has whole layers."""
    role, shape = facts.checkpoint, facts.shape
    if role is not None and shape is not None and facts.stages > shape.layers:
        must = f"must be the model's {shape.layers} layers at most"
        yield Breach(facts.label(role, "pp_size"), facts.stages, must, shape.layers)


def _number_types(facts: Facts) -> Iterator[Breach]:
    """FP8 needs sm_89, NVFP4 sm_100, SmoothQuant and bfloat16 sm_80, AWQ sm_75."""
    for role, name, wanted, first, near in _FIRST_SM:
        given = facts.args(role).get(name, False)
        if wanted not in str(given).split(",") if wanted else given in (False, "disable"):
            continue
        for sm in facts.sms:
            if sm < first:
                must = f"needs sm_{first} or later, and this is for sm_{sm}"
                yield Breach(facts.label(role, name), given, must, near, EngineIncompatible)


def _known_sm(facts: Facts) -> Iterator[Breach]:
    """sm is that of a GPU that TensorRT-LLM has, or had, kernels for."""
    sm = facts.config.sm
    if sm is not None and sm not in _KNOWN_SM:
        near = min(_KNOWN_SM, key=lambda known: abs(known - sm))
        must = f"must be one of {', '.join(map(str, _KNOWN_SM))}"
        yield Breach("sm", sm, must, near, EngineIncompatible)


def _one_rank(facts: Facts) -> Iterator[Breach]:
    """world_size and tensor_parallel are 1 with OpenVINO, which runs in one process."""
    for name in ("world_size", "tensor_parallel"):
        number = getattr(facts.config, name)
        if facts.family == "openvino" and number not in (None, 1):
            yield Breach(name, number, "must be 1 with example_name openvino", 1)


def _model(facts: Facts) -> Iterator[Breach]:
    """model_id is an id of the hub, or a directory or file that is there."""
    name = facts.config.model_id
    path = expanded(name)
    elsewhere = facts.config.model_tar_url is not None or name.startswith("pypi:")
    if not (elsewhere or is_hub_id(name) or os.access(path, os.F_OK)):
        there = next(parent for parent in path.absolute().parents if _is_directory(parent))
        near = None if there == Path(there.anchor) else there
        must = "does not exist, and is no id of the hub"
        yield Breach("model_id", name, must, near, ModelUnavailable)


def _is_directory(path: Path) -> bool:
    return os.access(path, os.F_OK) and path.is_dir()  # a name may be too long to ask for


def text(facts: Facts) -> Iterator[Breach]:
    """The family generates text with one engine."""
    if why := _NO_TEXT.get(facts.family):
        yield Breach("example_name", facts.config.example_name, why, error=UnknownExample)


Rule = Callable[[Facts], Iterator[Breach]]
OF_ARGUMENTS: tuple[Rule, ...] = (_counts, _sequence, _batch)
"""Rules that hold for a config whatever its model and its GPU are."""
RULES: tuple[Rule, ...] = (
    *OF_ARGUMENTS,
    *(_heads, _layers, _number_types, _known_sm, _one_rank, _model, text),
)


def breaches(facts: Facts, rules: tuple[Rule, ...] = RULES) -> list[Breach]:
    """All breaches of `rules`."""
    return [breach for rule in rules for breach in rule(facts)]


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
    family, sm = PurePosixPath(plan.family).name, plan.config.sm or sm
    sms = () if family == "openvino" else visible_gpus() if sm is None else (sm,)
    facts = Facts(plan.config, family, tuple(sorted(set(sms))))
    if facts.tensor_parallel * facts.stages > 1:
        facts = replace(facts, shape=_shape(_model_config(plan, workspace, echo)))
    found = breaches(facts)
    if not found:
        echo(f"[check] combinations: OK: none of {len(RULES)} rules is broken")
        return
    errors = {breach.error for breach in found}
    error = errors.pop() if len(errors) == 1 else BuildConfigInvalid
    raise error("\n".join(map(str, found)))


def _model_config(plan: Plan, workspace: Workspace, echo: Echo) -> Mapping[str, Any]:
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

            return hub.config(request)
    except ModelUnavailable as error:
        reason = error.detail
    echo(f"[check] combinations: heads and layers are NOT CHECKED: {reason}")
    return {}


def _shape(model: Mapping[str, Any]) -> ModelShape | None:
    try:
        return read_shape(model, "config.json") if model else None
    except BuildConfigInvalid:  # of an architecture that names its sizes otherwise
        return None
