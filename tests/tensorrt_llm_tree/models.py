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
    norm = {"weight": (HIDDEN,), "bias": (HIDDEN,)}
    layer = {
        **{f"ln_1.{kind}": shape for kind, shape in norm.items()},
        **{f"ln_2.{kind}": shape for kind, shape in norm.items()},
        "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
        "attn.c_attn.bias": (3 * HIDDEN,),
        "attn.c_proj.weight": (HIDDEN, HIDDEN),
        "attn.c_proj.bias": (HIDDEN,),
        "mlp.c_fc.weight": (HIDDEN, 4 * HIDDEN),
        "mlp.c_fc.bias": (4 * HIDDEN,),
        "mlp.c_proj.weight": (4 * HIDDEN, HIDDEN),
        "mlp.c_proj.bias": (HIDDEN,),
    }
    shapes = {
        "wte.weight": (vocabulary, HIDDEN),
        "wpe.weight": (LONGEST, HIDDEN),
        **{f"h.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()},
        **{f"ln_f.{kind}": shape for kind, shape in norm.items()},
    }
    return _write(directory, config, shapes)


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
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (3 * HIDDEN, HIDDEN),
        "mlp.up_proj": (3 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 3 * HIDDEN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        **{
            f"model.layers.{n}.{name}.weight": shape
            for n in range(LAYERS)
            for name, shape in layer.items()
        },
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocabulary, HIDDEN),
    }
    return _write(directory, config, shapes)


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


def _write(directory: Path, config: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> Path:
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory
