"""Families that are tried: which script converts them, and with which arguments."""

from __future__ import annotations

from collections.abc import Collection

from upstream.layer_names import NAMES

EXAMPLES = {
    **{family: family for family in NAMES},
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen",
    "starcoder2": "gpt",
    "gpt2": "gpt",
    "starcoder": "gpt",
}
"""By family: the directory of its script."""

Args = dict[str, str | int]


def arguments(
    family: str, options: Collection[str], model: str, output: str, tp: int
) -> Args | str:
    """Arguments of the family's script, which has `options`; or why there are none."""
    named = {
        "model_dir": model,
        "model-dir": model,
        "output_dir": output,
        "output-model-dir": output,
        "dtype": "float16",
        "ckpt-type": "hf",
        "tp_size": tp,
        "world-size": tp,
        "gpt_variant": family,
        "qwen_type": family,
    }
    if tp > 1 and not {"tp_size", "world-size"} & {*options}:
        return "its script has no --tp_size"
    return {name: value for name, value in named.items() if name in options}
