"""Rules between arguments, for mistakes that would cost hours of a GPU.

TensorRT-LLM's scripts take these arguments one by one, and fail after minutes, or build something
else without a word. All other combinations are left to them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cog_triton.builder.arguments import ArgumentValue, shown
from cog_triton.builder.config import BuildConfig, StepConfig
from cog_triton.download.model_request import is_hub_id
from cog_triton.errors import (
    BuildConfigInvalid,
    EngineIncompatible,
    ModelUnavailable,
    UnknownExample,
    UserError,
)
from cog_triton.sizing.memory_sum import ModelShape
from cog_triton.system.paths import expanded

Role = Literal["convert", "quantize", "build"]
_RANKS = ("tp_size", "tensor_parallelism", "world_size")
_COUNTS: dict[Role, tuple[str, ...]] = {
    "convert": (*_RANKS, "pp_size", "cp_size", "workers"),
    "quantize": (*_RANKS, "pp_size", "cp_size", "batch_size", "calib_max_seq_length"),
    "build": (
        *("max_batch_size", "max_input_len", "max_seq_len", "max_beam_width", "max_num_tokens"),
        *("opt_num_tokens", "max_encoder_input_len", "tokens_per_block", "max_lora_rank"),
        "workers",
    ),
}
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
_ENCODER_DECODERS = ("enc_dec", "whisper")
_NO_TEXT = ("bert", "dit", "mmdit", "stdit", "vit")


@dataclass(frozen=True)
class Facts:
    """A config of a family, whose engine is for `sms`; `shape` is its model's.

    A rule that needs what is not known, as `sms` is empty or `shape` None, finds nothing.
    """

    config: BuildConfig
    family: str
    sms: tuple[int, ...] = ()
    shape: ModelShape | None = None

    def _step(self, role: Role) -> tuple[str, StepConfig | None]:
        old = role == "convert" and self.config.convert_to_ft is not None
        key = "convert_to_ft" if old else role
        return key, getattr(self.config, key)

    def label(self, role: Role, name: str) -> str:
        """The YAML path of an option, with dashes if the config has them."""
        key, step = self._step(role)
        written = [n for n in (step.args if step else {}) if n.replace("-", "_") == name]
        return f"{key}.args.{written[0] if written else name}"

    def args(self, role: Role) -> dict[str, ArgumentValue]:
        """Arguments of a step, with underscores, without those that false leaves out."""
        _, step = self._step(role)
        given = {} if step is None else step.args
        return {key.replace("-", "_"): value for key, value in given.items() if value is not False}

    def number(self, role: Role, *names: str) -> int | None:
        """What is given for the first of `names` that is a whole number."""
        args = self.args(role)
        for value in (args.get(name) for name in names):
            if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    @property
    def checkpoint(self) -> Role | None:
        """The step whose output the engine is built from; None if it is made elsewhere."""
        roles: tuple[Role, ...] = ("quantize", "convert")
        return next((role for role in roles if self._step(role)[1]), None)

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share every layer."""
        return (self.checkpoint and self.number(self.checkpoint, *_RANKS)) or 1

    @property
    def stages(self) -> int:
        """Ranks that layers are spread over, one after another."""
        return (self.checkpoint and self.number(self.checkpoint, "pp_size")) or 1


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


def counts(facts: Facts) -> Iterator[Breach]:
    """Sizes, ranks and workers are 1 or more, max_draft_len and prompt tables 0 or more."""
    rows: list[tuple[Role, str, int]] = [
        (role, name, 1) for role, names in _COUNTS.items() for name in names
    ]
    rows += [("build", "max_draft_len", 0), ("build", "max_prompt_embedding_table_size", 0)]
    for role, name, least in rows:
        number = facts.number(role, name)
        if number is not None and number < least:
            yield Breach(facts.label(role, name), number, f"must be {least} or more", least)


def sequence(facts: Facts) -> Iterator[Breach]:
    """max_seq_len is max_input_len or more: longer prompts would be cut."""
    longest, prompt = facts.number("build", "max_seq_len"), facts.number("build", "max_input_len")
    if longest is not None and prompt is not None and 0 < longest < prompt:
        must = f"must be max_input_len, {prompt}, or more"
        yield Breach(facts.label("build", "max_seq_len"), longest, must, prompt)


def batch(facts: Facts) -> Iterator[Breach]:
    """max_num_tokens is max_batch_size or more: else the batch could never be full."""
    args = facts.args("build")
    tokens, most = facts.number("build", "max_num_tokens"), facts.number("build", "max_batch_size")
    counted = args.get("remove_input_padding") != "disable"
    raised = "speculative_decoding_mode" in args
    if tokens is not None and most is not None and counted and not raised and 0 < tokens < most:
        must = f"must be max_batch_size, {most}, or more"
        yield Breach(facts.label("build", "max_num_tokens"), tokens, must, most)


def heads(facts: Facts) -> Iterator[Breach]:
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


def layers(facts: Facts) -> Iterator[Breach]:
    """pp_size is the number of layers at most: each stage has whole layers."""
    role, shape = facts.checkpoint, facts.shape
    if role is not None and shape is not None and facts.stages > shape.layers:
        must = f"must be the model's {shape.layers} layers at most"
        yield Breach(facts.label(role, "pp_size"), facts.stages, must, shape.layers)


def number_types(facts: Facts) -> Iterator[Breach]:
    """FP8 needs sm_89, NVFP4 sm_100, SmoothQuant and bfloat16 sm_80, AWQ sm_75."""
    for role, name, wanted, first, near in _FIRST_SM:
        given = facts.args(role).get(name, False)
        asked = str(given).split(",") if wanted else [] if given in (False, "disable") else [None]
        for sm in facts.sms if wanted in asked else ():
            if sm < first:
                must = f"needs sm_{first} or later, and this is for sm_{sm}"
                where = facts.label(role, name)
                yield Breach(where, given, must, near, EngineIncompatible)


def known_sm(facts: Facts) -> Iterator[Breach]:
    """sm is that of a GPU that TensorRT-LLM has, or had, kernels for."""
    sm = facts.config.sm
    if sm is not None and sm not in _KNOWN_SM:
        near = min(_KNOWN_SM, key=lambda known: abs(known - sm))
        must = f"must be one of {', '.join(map(str, _KNOWN_SM))}"
        yield Breach("sm", sm, must, near, EngineIncompatible)


def one_rank(facts: Facts) -> Iterator[Breach]:
    """world_size and tensor_parallel are 1 with OpenVINO, which runs in one process."""
    for name in ("world_size", "tensor_parallel"):
        number = getattr(facts.config, name)
        if facts.family == "openvino" and number not in (None, 1):
            yield Breach(name, number, "must be 1 with example_name openvino", 1)


def model(facts: Facts) -> Iterator[Breach]:
    """model_id is an id of the hub, or a directory or file that is there."""
    name = facts.config.model_id
    path = expanded(name)
    elsewhere = facts.config.model_tar_url is not None or name.startswith("pypi:")
    if not (elsewhere or is_hub_id(name) or os.access(path, os.F_OK)):
        parents = (parent for parent in path.absolute().parents if os.access(parent, os.F_OK))
        there = next(parent for parent in parents if parent.is_dir())
        near = None if there == Path(there.anchor) else there
        must = "does not exist, and is no id of the hub"
        yield Breach("model_id", name, must, near, ModelUnavailable)


def text(facts: Facts) -> Iterator[Breach]:
    """The family generates text with one engine."""
    why = None
    if facts.family in _ENCODER_DECODERS:
        why = "is of encoder-decoder models, which are two engines, and are not built"
    elif facts.family in _NO_TEXT:
        why = "is no model that generates text"
    if why is not None:
        yield Breach("example_name", facts.config.example_name, why, error=UnknownExample)


Rule = Callable[[Facts], Iterator[Breach]]
OF_ARGUMENTS: tuple[Rule, ...] = (counts, sequence, batch)
"""Rules that hold for a config whatever its model and its GPU are."""
RULES: tuple[Rule, ...] = (
    *OF_ARGUMENTS,
    *(heads, layers, number_types, known_sm, one_rank, model, text),
)


def breaches(facts: Facts, rules: tuple[Rule, ...] = RULES) -> list[Breach]:
    """All breaches of `rules`."""
    return [breach for rule in rules for breach in rule(facts)]
