"""Example family of a model's architecture, and the arguments that its convert script wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cog_triton.builder.arguments import ArgumentValue
from cog_triton.errors import UnknownExample, nearest


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Example family `name`; `names` are the script's own names of the usual arguments."""

    name: str
    extra: Mapping[str, ArgumentValue] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    weight_only: bool = True
    splits_experts: bool = False


_GEMMA = ModelFamily(
    "gemma",
    {"ckpt-type": "hf"},
    {"model_dir": "model-dir", "output_dir": "output-model-dir", "tp_size": "world-size"},
    weight_only=False,
)
_LLAMA = ModelFamily("llama", splits_experts=True)
_QWEN = ModelFamily("qwen", splits_experts=True)
_FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN,
    "Qwen3MoeForCausalLM": _QWEN,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "PhiForCausalLM": ModelFamily("phi"),
    "Phi3ForCausalLM": ModelFamily("phi"),
    "GPT2LMHeadModel": ModelFamily("gpt", {"gpt_variant": "gpt2"}),
    "GPTBigCodeForCausalLM": ModelFamily("gpt", {"gpt_variant": "starcoder"}),
    "Starcoder2ForCausalLM": ModelFamily("gpt", {"gpt_variant": "starcoder2"}),
    "InternLM2ForCausalLM": ModelFamily("internlm2"),
    "BloomForCausalLM": ModelFamily("bloom"),
    "FalconForCausalLM": ModelFamily("falcon"),
    "GPTJForCausalLM": ModelFamily("gptj"),
    "GPTNeoXForCausalLM": ModelFamily("gptneox"),
    "MptForCausalLM": ModelFamily("mpt"),
    "OPTForCausalLM": ModelFamily("opt"),
}


def family_of(architecture: str, where: str) -> ModelFamily:
    """Family whose scripts convert `architecture`; `where` names the model in errors.

    Raises:
        UnknownExample: none does.
    """
    if architecture in _FAMILIES:
        return _FAMILIES[architecture]
    raise UnknownExample(
        f"{where}: architecture {architecture or 'not named'!r}: this command knows the scripts of"
        f" {', '.join(_FAMILIES)}{nearest(architecture, list(_FAMILIES))}; --for vllm serves many"
        " more"
    )
