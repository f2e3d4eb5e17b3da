"""Engine config, config.json, as TensorRT-LLM's `EngineConfig.to_dict` and our builder write it.

Shapes: before 0.8 it is `BuilderConfig.to_dict`, flat and without a version. 0.8 to 0.10 have
`max_output_len`, later ones `max_seq_len`; `cp_size` came after 0.12. The GPU and TensorRT's
version are in none of them.
"""

from __future__ import annotations

import json
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cog_triton.errors import EngineCorrupt
from cog_triton.system.printable import first_problem

CONFIG_NAME = "config.json"
TENSORRT_LLM = "tensorrt_llm"
CPU_FAMILIES = ("openvino",)
# Before 0.8 names begin with the model's, as in gpt_float16_tp1_rank0.engine.
_RANK = re.compile(r"(?:.+_)?rank(0|[1-9]\d{0,5})\.engine")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Mapping(_Section):
    """Parallelism: tensor, pipeline and context; their product is the number of ranks."""

    tp_size: int = Field(default=1, ge=1)
    pp_size: int = Field(default=1, ge=1)
    cp_size: int = Field(default=1, ge=1)
    world_size: int | None = None

    @model_validator(mode="after")
    def _product(self) -> Self:
        if self.world_size not in (None, self.ranks):
            raise ValueError(
                f"world_size must be tp_size x pp_size x cp_size,"
                f" {self.tp_size} x {self.pp_size} x {self.cp_size} = {self.ranks}"
            )
        return self

    @property
    def ranks(self) -> int:
        """Number of ranks: processes of one GPU each."""
        return self.tp_size * self.pp_size * self.cp_size


class Quantization(_Section):
    """Quantization of weights and KV cache; None is the weights' own dtype."""

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None


class Pretrained(_Section):
    """Model; `dtype` and `logits_dtype` as float16, bfloat16, float32."""

    architecture: str
    dtype: str
    logits_dtype: str = "float32"
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    vocab_size: int | None = None
    mapping: Mapping = Mapping()
    quantization: Quantization | None = None


class Plugins(_Section):
    """Plugins and kernel options of the engine; None is not recorded."""

    remove_input_padding: bool | None = None
    context_fmha: bool | None = None
    use_paged_context_fmha: bool | None = None
    paged_kv_cache: bool | None = None
    lora_plugin: str | bool | None = None


class LoRABuild(_Section):
    """LoRA adapters that the engine was built for; without modules, those of its lora_dir."""

    max_lora_rank: int | None = None
    lora_target_modules: list[str] = []


class Limits(_Section):
    """Build limits: lengths in tokens, `max_batch_size` in requests.

    `speculative_decoding_mode` is one bit of TensorRT-LLM's SpeculativeDecodingMode: 1 none,
    2 external draft tokens, 4 Medusa, 8 lookahead, 16 ReDrafter, 32 Eagle.
    """

    max_input_len: int = Field(ge=1)
    max_seq_len: int | None = Field(default=None, ge=1)
    max_output_len: int | None = Field(default=None, ge=1)
    max_batch_size: int = Field(ge=1)
    max_beam_width: int | None = None
    max_num_tokens: int | None = None
    kv_cache_type: str | None = None
    speculative_decoding_mode: int | None = None
    weight_streaming: bool | None = None
    plugin_config: Plugins = Plugins()
    lora_config: LoRABuild | None = None

    @model_validator(mode="after")
    def _has_a_length(self) -> Self:
        if self.max_seq_len is None and self.max_output_len is None:
            raise ValueError("must have max_seq_len, or max_output_len")
        return self

    @property
    def seq_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.max_seq_len or self.max_input_len + (self.max_output_len or 0)

    @property
    def paged_kv_cache(self) -> bool:
        """Whether the KV cache is paged; `kv_cache_type` replaced the plugin's flag."""
        if self.kv_cache_type is not None:
            return self.kv_cache_type.lower() == "paged"
        return bool(self.plugin_config.paged_kv_cache)


class EngineConfig(_Section):
    """config.json; without `engine` it is TensorRT-LLM's own.

    `version` is the builder library's; empty for TensorRT-LLM before 0.8, which wrote none.
    """

    engine: str = TENSORRT_LLM
    version: str
    pretrained_config: Pretrained
    build_config: Limits

    @property
    def on_cpu(self) -> bool:
        """Whether the engine runs on the CPU."""
        return self.engine in CPU_FAMILIES

    def longest_prompt(self, *, chunked: bool) -> int:
        """Longest prompt in tokens; `chunked` if prompts are prefilled in several steps.

        TensorRT-LLM ignores max_input_len since 0.12, unless input is padded (TrtGptModel).
        """
        limits, plugins = self.build_config, self.build_config.plugin_config
        release = re.match(r"(\d+)\.(\d+)", self.version)
        if self.engine != TENSORRT_LLM or release is None:
            return limits.max_input_len
        if (int(release[1]), int(release[2])) < (0, 12):
            return limits.max_input_len
        if chunked:
            return limits.seq_len - 1
        if plugins.context_fmha and plugins.remove_input_padding and limits.max_num_tokens:
            return min(limits.seq_len - 1, limits.max_num_tokens)
        return limits.max_input_len


def parse(text: bytes, origin: str) -> EngineConfig:
    """Parse the bytes of config.json; `origin` names them in errors.

    Raises:
        EngineCorrupt: names the key, its value and the rule.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineCorrupt(f"{origin}: not JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("builder_config"), dict):
        value = _from_builder_config(value["builder_config"])
        origin = f"{origin}, of TensorRT-LLM before 0.8"
    if not isinstance(value, dict) or not {"pretrained_config", "build_config"} <= value.keys():
        raise EngineCorrupt(
            f"{origin}: not a built engine's: must have pretrained_config and build_config"
        )
    try:
        return EngineConfig.model_validate(value)
    except ValidationError as error:
        raise EngineCorrupt(f"{origin}: {first_problem(error)}") from error


def _from_builder_config(old: dict[str, Any]) -> dict[str, Any]:
    """Translate the shape before 0.8 to the later one; missing keys stay missing."""
    model = {"architecture": "name", "dtype": "precision"}
    mapping = {"tp_size": "tensor_parallel", "pp_size": "pipeline_parallel"}
    limits = ("max_input_len", "max_output_len", "max_batch_size", "max_beam_width")
    return {
        "version": "",
        "pretrained_config": {
            **{new: old[key] for new, key in model.items() if key in old},
            "mapping": {new: old[key] for new, key in mapping.items() if key in old},
        },
        "build_config": {key: old[key] for key in (*limits, "max_num_tokens") if key in old},
    }


def missing_file(config: EngineConfig, sizes: dict[str, int]) -> str | None:
    """The first problem of an engine with files of `sizes` (bytes, by name), None if there is none.

    TensorRT-LLM needs one engine file for each rank, and no more.
    """
    if config.engine in CPU_FAMILIES:
        needed = ["openvino_model.xml", "openvino_model.bin"]
        rule = "every OpenVINO engine has it"
    else:
        mapping = config.pretrained_config.mapping
        held = {int(match[1]): match[0] for match in map(_RANK.fullmatch, sizes) if match}
        rule = (
            f"{CONFIG_NAME} says tp {mapping.tp_size} x pp {mapping.pp_size} x cp"
            f" {mapping.cp_size} = {mapping.ranks}, there are {len(held)} rank*.engine"
        )
        if len(held) > mapping.ranks:
            return f"{held[max(held)]} is one too many: {rule}"
        # A config that says a billion would make a billion names.
        ranks = range(min(mapping.ranks, len(held) + 1))
        needed = [held.get(rank, f"rank{rank}.engine") for rank in ranks]
    for name in needed:
        if name not in sizes:
            return f"{name} is missing: {rule}"
        if not sizes[name]:
            return f"{name} is empty"
    return None
