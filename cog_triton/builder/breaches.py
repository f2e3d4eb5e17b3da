"""Breaches of the rules of combinations: each finds its own in the facts.

Facts are a config's arguments, its model, GPUs and TensorRT-LLM. Options have underscores here,
whatever the config and the script have.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cog_triton.builder.arguments import ArgumentValue, shown
from cog_triton.builder.config import BuildConfig, StepConfig
from cog_triton.download.model_request import is_hub_id
from cog_triton.settings import load_group
from cog_triton.settings.programs import BuilderSettings
from cog_triton.sizing.memory_sum import ModelShape
from cog_triton.system.paths import expanded

Role = Literal["convert", "quantize", "build"]
ROLES: tuple[Role, ...] = ("convert", "quantize", "build")
Version = tuple[int, int]
RECORDED: Version = (1, 0)
"""TensorRT-LLM of the recorded scripts, as far as rules tell releases apart."""
_OLDEST: Version = (0, 9)
ABSENT = object()
ON = (None, True, "enable")
OFF = (False, "disable")
_RANKS = ("tp_size", "tensor_parallelism", "world_size")


@dataclass(frozen=True)
class Facts:
    """One config: `sms` are the GPUs it is for, `model` is its config.json.

    `sms` or `model` is empty, `shape` None, where it is not known, and rules that need it hold.
    """

    config: BuildConfig
    family: str
    version: Version = RECORDED
    sms: tuple[int, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    shape: ModelShape | None = None

    def args(self, role: Role) -> dict[str, ArgumentValue]:
        """Arguments of a step without those left out; empty if there is no such step."""
        step = self._step(role)
        given = {} if step is None else step.args
        return {key.replace("-", "_"): value for key, value in given.items() if value is not False}

    def value(self, role: Role, name: str) -> ArgumentValue:
        """What is given for `name`; false if nothing is."""
        return self.args(role).get(name, False)

    def number(self, role: Role, *names: str, default: int | None = None) -> int | None:
        """What is given for the first of `names` that is a whole number; else `default`."""
        args = self.args(role)
        for name in names:
            value = args.get(name)
            if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def given(self, role: Role, name: str) -> object:
        """What the config has for `name`, false included; `ABSENT` if it has nothing."""
        step = self._step(role)
        args = {} if step is None else step.args
        return next((v for key, v in args.items() if key.replace("-", "_") == name), ABSENT)

    def on(self, role: Role, name: str) -> bool:
        """Whether `name` is a bare flag there, or ``enable``."""
        return self.given(role, name) in ON

    def label(self, role: Role, name: str) -> str:
        """The YAML path of an option, as the config writes it."""
        step = self._step(role)
        keys = [] if step is None else [key for key in step.args if key.replace("-", "_") == name]
        section = self._key(role)
        return f"{section}.args.{keys[0] if keys else name}"

    @property
    def checkpoint(self) -> Role | None:
        """The step whose output the engine is built from; None if it is made elsewhere."""
        return next((role for role in ("quantize", "convert") if self._step(role)), None)

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share every layer."""
        role = self.checkpoint
        return (role and self.number(role, *_RANKS)) or 1

    @property
    def ranks(self) -> int:
        """Ranks that have a part of the model: of layers, of experts, or whole layers."""
        role = self.checkpoint
        return self.tensor_parallel * ((role and self.number(role, "pp_size")) or 1)

    def _key(self, role: Role) -> str:
        old = role == "convert" and self.config.convert_to_ft is not None
        return "convert_to_ft" if old else role

    def _step(self, role: Role) -> StepConfig | None:
        step: StepConfig | None = getattr(self.config, self._key(role))
        return step


def installed_version(recorded: bool) -> Version:
    """TensorRT-LLM that TRTLLM_DIR has, whose ``version.py`` says it.

    Without one it is that of the recorded scripts, or, if `recorded` is false, the oldest.
    """
    root = load_group(BuilderSettings).trtllm_dir
    path = None if root is None else Path(root) / "tensorrt_llm" / "version.py"
    if path is not None and path.is_file():
        found = re.search(r"__version__\s*=\s*[\"'](\d+)\.(\d+)", path.read_text("utf-8"))
        if found:
            return int(found[1]), int(found[2])
    return RECORDED if recorded else _OLDEST


@dataclass(frozen=True)
class Broken:
    """One breach: the YAML path, its value, what must be, and the nearest value that holds."""

    where: str
    value: object
    must: str
    near: object = None

    def __str__(self) -> str:
        near = "" if self.near is None else f"; nearest: {self.near}"
        return f"{self.where}: {_shown(self.value)}: {self.must}{near}"


Clash = tuple[str, str, str, str] | tuple[str, str, str, str, str]
Kernel = tuple[str, str, int, int] | tuple[str, str, int, int, str]
"""Rows of combinations.yaml, whose head says what they hold."""

_MOST_ELEMENTS = 1 << 31
_DEFAULT_BATCH = 2048
_SIZES = ("tp_size", "pp_size", "cp_size", "world_size", "tensor_parallelism")
_POSITIVE: dict[Role, tuple[str, ...]] = {
    "convert": (*_SIZES, "workers"),
    "quantize": (
        *(*_SIZES, "calib_tp_size", "calib_pp_size", "batch_size"),
        *("tokenizer_max_seq_length", "calib_max_seq_length"),
    ),
    "build": (
        *("max_batch_size", "max_input_len", "max_seq_len", "max_decoder_seq_len"),
        *("max_beam_width", "max_num_tokens", "opt_num_tokens", "max_encoder_input_len"),
        *("tokens_per_block", "max_lora_rank", "workers"),
    ),
}
_NOT_NEGATIVE = ("max_draft_len", "max_prompt_embedding_table_size", "max_multimodal_len")
_FP8_FORMATS = ("fp8", "w4a8_awq", "nvfp4")
_SPECULATIVE = {"medusa": "medusa", "explicit_draft_tokens": "redrafter", "eagle": "eagle"}
_SPLITS_VOCABULARY = ("bloom", "gptneox", "mpt", "falcon", "gemma", "recurrentgemma")
# Their position embeddings are a table with a row for each position.
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "opt", "gpt_neo")
_STATES: dict[str, Callable[[object], bool]] = {
    "asked": lambda value: value in ON,
    "set": lambda value: value is not ABSENT and value is not False,
    "used": lambda value: value is not ABSENT and value not in OFF,
    "unset": lambda value: value is ABSENT or value is False,
}
_KNOWN_SM = (70, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121)
_ENCODER_DECODERS = ("enc_dec", "whisper")
_NO_TEXT = ("bert", "dit", "mmdit", "stdit", "vit")


def _is(facts: Facts, option: str, state: str) -> bool:
    """Whether ``step.name`` is in a state of combinations.yaml."""
    value = facts.given(*_split(option))
    if state in _STATES:
        return _STATES[state](value)
    return not {str(value), *str(value).split(",")}.isdisjoint(state.split("|"))


def _split(option: str) -> tuple[Role, str]:
    step, _, name = option.partition(".")
    return next(role for role in ROLES if role == step), name


def clash(facts: Facts, row: Clash) -> Iterator[Broken]:
    """An option beside another, or without it."""
    option, state, other, other_state, *near = row
    if _is(facts, option, state) and _is(facts, other, other_state):
        role, name = _split(other)
        verb = "needs" if other_state == "unset" else "does not go with"
        value = "" if other_state == "unset" else f": {_shown(facts.given(role, name))}"
        must = f"{verb} {facts.label(role, name)}{value}"
        role, name = _split(option)
        yield Broken(facts.label(role, name), facts.given(role, name), must, *near or ["left out"])


def kernel(facts: Facts, row: Kernel) -> Iterator[Broken]:
    """An option for GPUs that lack what it needs; a first SM below 0 begins those that do."""
    option, state, first, last, *near = row
    for sm in facts.sms if _is(facts, option, state) else ():
        if (abs(first) <= sm <= last) == (first < 0):
            needs = f"needs sm_{first}{'' if first == last else ' or later'}"
            must = "has no kernels there" if first < 0 else needs
            role, name = _split(option)
            label = facts.label(role, name)
            yield Broken(label, facts.given(role, name), f"{must}, and this is for sm_{sm}", *near)


def counts(facts: Facts) -> Iterator[Broken]:
    """Counts below their least."""
    rows = [(role, name, 1) for role, names in _POSITIVE.items() for name in names]
    build: Role = "build"
    for role, name, least in (*rows, *((build, name, 0) for name in _NOT_NEGATIVE)):
        number = facts.number(role, name)
        if number is not None and number < least:
            yield Broken(facts.label(role, name), number, f"must be {least} or more", least)


def input_in_sequence(facts: Facts) -> Iterator[Broken]:
    """max_seq_len below max_input_len."""
    longest, prompt = facts.number("build", "max_seq_len"), facts.number("build", "max_input_len")
    if longest is not None and prompt is not None and 0 < longest < prompt:
        must = f"must be max_input_len, {prompt}, or more"
        yield Broken(facts.label("build", "max_seq_len"), longest, must, prompt)


def batch_in_tokens(facts: Facts) -> Iterator[Broken]:
    """max_num_tokens below max_batch_size, where it counts and is not raised by itself."""
    tokens, batch = facts.number("build", "max_num_tokens"), facts.number("build", "max_batch_size")
    packed = facts.given("build", "remove_input_padding") not in OFF
    raised = "speculative_decoding_mode" in facts.args("build")
    if tokens is not None and batch is not None and packed and not raised and 0 < tokens < batch:
        must = f"must be max_batch_size, {batch}, or more"
        yield Broken(facts.label("build", "max_num_tokens"), tokens, must, batch)


def volume(facts: Facts) -> Iterator[Broken]:
    """More elements than a tensor of TensorRT may have."""
    length = facts.number("build", "max_seq_len")
    default = _DEFAULT_BATCH if facts.version >= (0, 14) else 1
    batch = facts.number("build", "max_batch_size", default=default) or 0
    beams = facts.number("build", "max_beam_width", default=1) or 0
    if length is not None and min(batch, beams) > 0 and length * batch * beams > _MOST_ELEMENTS:
        must = f"times max_batch_size {batch} times max_beam_width {beams} must be 2^31 at most"
        near = max(1, _MOST_ELEMENTS // (batch * beams))
        yield Broken(facts.label("build", "max_seq_len"), length, must, near)


def positions(facts: Facts) -> Iterator[Broken]:
    """Lengths beyond the table of a model whose positions are learned."""
    if facts.shape is None or facts.model.get("model_type") not in _LEARNED_POSITIONS:
        return
    most = facts.shape.max_len
    for name in ("max_seq_len", "max_input_len"):
        number = facts.number("build", name)
        if number is not None and number > most:
            must = f"must be the model's positions, {most}, at most"
            yield Broken(facts.label("build", name), number, must, most)


def logits_of_drafts(facts: Facts) -> Iterator[Broken]:
    """Logits of the prompt beside draft tokens."""
    for name in ("gather_context_logits", "gather_all_token_logits"):
        if facts.on("build", name) and (facts.number("build", "max_draft_len") or 0) > 0:
            must = "must be left out with max_draft_len"
            given = facts.given("build", name)
            yield Broken(facts.label("build", name), given, must, "gather_generation_logits")


def fp8_attention(facts: Facts) -> Iterator[Broken]:
    """FP8 attention without an FP8 checkpoint."""
    role = facts.checkpoint
    if role is None or not facts.on("build", "use_fp8_context_fmha"):
        return
    formats = str(facts.value("quantize", "qformat")).split(",")
    flags = any(word in name for name in facts.args("convert") for word in ("fp8", "fp4"))
    # What is quantized already is converted as it is.
    others = {"quant_ckpt_path", "nemo_ckpt_path"} & facts.args("convert").keys()
    stored = "quantization_config" in facts.model or others
    named = any(word in facts.config.model_id.lower() for word in ("fp8", "fp4", "w4a8"))
    automatic = "autoq_format" in facts.args("quantize")
    if not (flags or stored or named or automatic or any(f in _FP8_FORMATS for f in formats)):
        must = f"needs an FP8 checkpoint, and {role} makes none"
        yield Broken(facts.label("build", "use_fp8_context_fmha"), "enable", must, "disable")


def experts(facts: Facts) -> Iterator[Broken]:
    """Ranks of experts that do not make up the ranks."""
    ranks = facts.tensor_parallel
    sizes = {
        name: number
        for name in ("moe_tp_size", "moe_ep_size")
        if (number := facts.number("convert", name, default=-1)) not in (None, -1)
    }
    product = math.prod(sizes.values())
    if not sizes or (
        product > 0 and (ranks == product if len(sizes) == 2 else not ranks % product)
    ):
        return
    name, size = [*sizes.items()][-1]
    rest = product // size if size else 1
    even = len(sizes) == 2 and rest > 0 and not ranks % rest
    must = "times moe_tp_size must be" if len(sizes) == 2 else "must divide"
    near = ranks // rest if even else _divisor(ranks, size)
    yield Broken(facts.label("convert", name), size, f"{must} tp_size, {ranks}", near)


def heads(facts: Facts) -> Iterator[Broken]:
    """Ranks that cannot share the model's heads."""
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
        name = next((n for n in _SIZES[3:] if n in facts.args(role)), "tp_size")
        kv = f", and its {shared} KV heads divide it or it them" if shared > 1 else ""
        must = f"must divide the model's {shape.heads} heads{kv}"
        near = min(fits, key=lambda n: (abs(n - ranks), n))
        yield Broken(facts.label(role, name), ranks, must, near)


def layers(facts: Facts) -> Iterator[Broken]:
    """Stages of a pipeline that cannot share the model's layers."""
    role, shape = facts.checkpoint, facts.shape
    stages = (role and facts.number(role, "pp_size")) or 1
    if role is None or shape is None or stages < 1:
        return
    even = facts.version < (0, 15)
    if stages > shape.layers or (even and shape.layers % stages):
        rule = f"divide the model's {shape.layers} layers" if even else f"be {shape.layers} at most"
        near = _divisor(shape.layers, stages) if even else shape.layers
        yield Broken(facts.label(role, "pp_size"), stages, f"must {rule}", near)


def vocabulary(facts: Facts) -> Iterator[Broken]:
    """Ranks that cannot share the embeddings."""
    ranks, shape = facts.tensor_parallel, facts.shape
    split = facts.on("convert", "use_parallel_embedding") and (
        facts.number("convert", "embedding_sharding_dim", default=0) == 0
    )
    padded = facts.family not in _SPLITS_VOCABULARY
    if split and shape is not None and not padded and ranks > 1 and shape.vocabulary % ranks:
        must = f"needs a tp_size that divides the vocabulary, {shape.vocabulary}, and it is {ranks}"
        near = f"tp_size {_divisor(shape.vocabulary, ranks)}"
        given = facts.given("convert", "use_parallel_embedding")
        yield Broken(facts.label("convert", "use_parallel_embedding"), given, must, near)


def speculative(facts: Facts) -> Iterator[Broken]:
    """A way of speculative decoding whose heads the checkpoint does not have."""
    mode = facts.value("build", "speculative_decoding_mode")
    family = _SPECULATIVE.get(str(mode), facts.family)
    by_quantize = mode == "medusa" and "medusa_model_dir" in facts.args("quantize")
    if facts.checkpoint is not None and facts.family != family and not by_quantize:
        must = f"needs a checkpoint of example_name {family}, and this is {facts.family}"
        yield Broken(facts.label("build", "speculative_decoding_mode"), mode, must, "left out")


def draft_length(facts: Facts) -> Iterator[Broken]:
    """Speculative decoding without room for draft tokens."""
    mode = facts.value("build", "speculative_decoding_mode")
    length = facts.number("build", "max_draft_len", default=0)
    if mode in ("draft_tokens_external", "lookahead_decoding") and length == 0:
        must = f"must be 1 or more with speculative_decoding_mode {mode}"
        yield Broken(facts.label("build", "max_draft_len"), length, must, 1)


def eagle(facts: Facts) -> Iterator[Broken]:
    """More than EAGLE takes."""
    if facts.value("build", "speculative_decoding_mode") != "eagle":
        return
    for name, default, most in (("max_batch_size", _DEFAULT_BATCH, 512), ("max_draft_len", 0, 256)):
        number = facts.number("build", name, default=default)
        if number is not None and number > most:
            must = f"must be {most} at most with speculative_decoding_mode eagle"
            yield Broken(facts.label("build", name), number, must, most)


def streaming(facts: Facts) -> Iterator[Broken]:
    """StreamingLLM with a model that has none."""
    if facts.family != "llama" and facts.on("build", "streamingllm"):
        must = f"is for example_name llama, and this is {facts.family}"
        yield Broken(facts.label("build", "streamingllm"), "enable", must, "disable")


def openvino(facts: Facts) -> Iterator[Broken]:
    """Ranks of an engine that runs on the CPU."""
    for name in ("world_size", "tensor_parallel"):
        number = getattr(facts.config, name)
        if facts.family == "openvino" and number not in (None, 1):
            yield Broken(name, number, "must be 1 with example_name openvino", 1)


def unknown_sm(facts: Facts) -> Iterator[Broken]:
    """An SM that no GPU has, or none that TensorRT-LLM has kernels for."""
    sm = facts.config.sm
    if sm is not None and sm not in _KNOWN_SM:
        near = min(_KNOWN_SM, key=lambda known: abs(known - sm))
        yield Broken("sm", sm, f"must be one of {', '.join(map(str, _KNOWN_SM))}", near)


def no_model(facts: Facts) -> Iterator[Broken]:
    """A path with nothing there."""
    name = facts.config.model_id
    path = expanded(name)
    elsewhere = facts.config.model_tar_url is not None or name.startswith("pypi:")
    if not (elsewhere or is_hub_id(name) or os.access(path, os.F_OK)):
        parents = (parent for parent in path.absolute().parents if os.access(parent, os.F_OK))
        there = next(parent for parent in parents if parent.is_dir())
        near = None if there == Path(there.anchor) else there
        yield Broken("model_id", name, "does not exist, and is no id of the hub", near)


def encoder_decoder(facts: Facts) -> Iterator[Broken]:
    """A family of two engines."""
    if facts.family in _ENCODER_DECODERS:
        must = "encoder-decoder models are not built"
        yield Broken("example_name", facts.config.example_name, must)


def no_text(facts: Facts) -> Iterator[Broken]:
    """A family of no language models."""
    if facts.family in _NO_TEXT:
        yield Broken("example_name", facts.config.example_name, "is no model that generates text")


def _shown(value: object) -> str:
    return shown(value if isinstance(value, bool | int | float | str | None) else str(value))


def _divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`, the smaller one of two."""
    most = math.isqrt(min(max(number, 1), 1 << 31))  # a config may have any number
    low = {n for n in range(1, most + 1) if not number % n}
    return min(low | {number // n for n in low}, key=lambda n: (abs(n - wanted), n))
