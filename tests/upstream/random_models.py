"""Small random models of the families of TensorRT-LLM's scripts, by transformers' own classes.

``python random_models.py DIRECTORY FAMILY...``, in an environment with torch and transformers,
writes ``DIRECTORY/FAMILY`` as ``save_pretrained`` does. No parameter is left as a constructor makes
it, as zeros and ones would hide what a conversion mixes up; each number is a multiple of 2^-10 in
[-0.5, 0.5), which float16 holds exactly, also after Gemma's addition of 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 259
"""Odd, so that each rank of two gets a padded half."""
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_ctx": 128,
}
# For the families whose scripts do not pad it.
_EVEN = {"vocab_size": VOCABULARY + 1}


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "mistral": ("Mistral", {**_LLAMA, "sliding_window": 64}),
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", _LLAMA),
    "gemma": ("Gemma", {**_LLAMA, **_EVEN, "head_dim": 16, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", _GPT),
    "starcoder": ("GPTBigCode", {**_GPT, "multi_query": True}),
}
"""By family: the prefix of transformers' classes, and their sizes."""


def write(family: str, directory: Path) -> None:
    prefix, sizes = CONFIGS[family]
    config = getattr(transformers, f"{prefix}Config")(torch_dtype="float16", **sizes)
    head = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{prefix}{head}")(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-512, 512, parameter.shape, generator=random) / 1024)
    model.half().save_pretrained(directory)


def main(directory: Path, families: list[str]) -> None:
    for family in families:
        write(family, directory / family)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
