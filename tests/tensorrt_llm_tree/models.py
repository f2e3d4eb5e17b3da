"""Tiny models as Hugging Face directories: random weights of a fixed seed, a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, LONGEST = 16, 2, 4, 64


def gpt2(directory: Path) -> Path:
    """As sshleifer/tiny-gpt2, with a smaller vocabulary; returns `directory`."""
    vocabulary = _tokenizer(directory)
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_embd": HIDDEN,
        "n_positions": LONGEST,
        "vocab_size": vocabulary,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }
    return _write(directory, config)


def llama(directory: Path) -> Path:
    """As a Llama of two layers, with half as many key-value heads; returns `directory`."""
    vocabulary = _tokenizer(directory)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "max_position_embeddings": LONGEST,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    }
    return _write(directory, config)


def _tokenizer(directory: Path) -> int:
    """Write a tokenizer of single bytes; how many tokens it has."""
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": LONGEST}))
    return len(vocabulary) + 1  # an odd number, so that two ranks need a padded one


def _write(directory: Path, config: dict[str, object]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    tensor = np.random.default_rng(0).standard_normal((HIDDEN, HIDDEN), np.float32)
    save_file({"model.weight": tensor}, directory / "model.safetensors")
    return directory
