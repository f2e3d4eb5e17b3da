"""A small model of Qwen2-VL's shape that takes images; its weights are made up by vLLM."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
_HIDDEN = 512


def write(directory: Path, arguments: Mapping[str, Any], placeholder: str = PLACEHOLDER) -> Path:
    """The model's directory; its template writes `placeholder` for an image."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = {token: 256 + place for place, token in enumerate(_SPECIAL)}
    _tokenizer().save(str(directory / "tokenizer.json"))
    _write(
        directory / "tokenizer_config.json",
        tokenizer_class="Qwen2Tokenizer",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        chat_template=_TEMPLATE.replace("PLACEHOLDER", placeholder),
    )
    plain = _alphabet()
    _write(directory / "vocab.json", **{shown: byte for byte, shown in plain.items()})
    (directory / "merges.txt").write_text("#version: 0.2\n", "utf-8")
    _write(
        directory / "config.json",
        architectures=["Qwen2VLForConditionalGeneration"],
        model_type="qwen2_vl",
        torch_dtype="bfloat16",
        hidden_size=_HIDDEN,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=256 + len(_SPECIAL),
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        vision_token_id=ids["<|vision_pad|>"],
        bos_token_id=256,
        eos_token_id=ids["<|im_end|>"],
        vision_config={
            "depth": 2, "embed_dim": 256, "hidden_size": _HIDDEN, "mlp_ratio": 4, "num_heads": 4,
            "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    )  # fmt: skip
    _write(
        directory / "preprocessor_config.json",
        image_processor_type="Qwen2VLImageProcessor",
        processor_class="Qwen2VLProcessor",
        min_pixels=3136,
        max_pixels=1003520,
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    limits = {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    _write(directory / "model.json", **{"load_format": "dummy", **arguments, **limits})
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


def _tokenizer() -> Tokenizer:
    """A token for each byte, and the special ones."""
    made = Tokenizer(models.BPE({shown: byte for byte, shown in _alphabet().items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return made


def _alphabet() -> dict[int, str]:
    """Each byte as byte-level tokenizers write it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    shown = {byte: chr(byte) for byte in plain}
    return shown | {byte: chr(256 + place) for place, byte in enumerate(rest)}


def _write(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content), "utf-8")
