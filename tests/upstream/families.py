"""Families that are tried: which script converts them, and with which arguments."""

from __future__ import annotations

from collections.abc import Collection

EXAMPLES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen",
    "gemma": "gemma",
    "gpt2": "gpt",
    "starcoder": "gpt",
}
"""By family: the directory of its script."""


def arguments(family: str, options: Collection[str], tp: int) -> dict[str, str | int]:
    """Arguments of the family's script, which has `options`.

    Raises:
        LookupError: the script makes no checkpoint of several ranks.
    """
    named = {
        "model_dir": "model",
        "model-dir": "model",
        "output_dir": "checkpoint",
        "output-model-dir": "checkpoint",
        "dtype": "float16",
        "ckpt-type": "hf",
        "tp_size": tp,
        "world-size": tp,
        "gpt_variant": family,
        "qwen_type": family,
    }
    if tp > 1 and not {"tp_size", "world-size"} & {*options}:
        raise LookupError("its script has no --tp_size")
    return {name: value for name, value in named.items() if name in options}
