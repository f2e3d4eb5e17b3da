"""Conversions of values that rules of migrations name, from TensorRT-LLM's notation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cog_triton.engines.tensorrt_llm.adapter_modules import HF_MODULES
from cog_triton.engines.vllm.argument_types import recorded

_GIB = 1 << 30


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _lora_rank(value: Any) -> int:
    """The least rank of vLLM's that has room for `value`."""
    kinds = recorded()[0].engine_args["max_lora_rank"]
    ranks = sorted(int(kind[1:]) for kind in kinds if kind[1:].isdecimal())
    return next((rank for rank in ranks if rank >= int(value)), ranks[-1])


def _lora_modules(value: Any) -> list[str]:
    """Hugging Face's names of modules: ``attn_q`` is ``q_proj``."""
    return [HF_MODULES.get(item, item) for item in _items(value)]


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "fp8": lambda _: "fp8",
    "on": lambda _: True,
    "gib": lambda value: round(value / _GIB, 3),
    "list": _items,
    "upper": lambda value: str(value).upper(),
    "lora_rank": _lora_rank,
    "lora_modules": _lora_modules,
}
"""By the names that rules give in ``as``."""
