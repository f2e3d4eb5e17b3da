"""Images on the real vLLM: a small Qwen2-VL with made-up weights, and its checks."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client import Client
from results import Phase
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_IDS = {name: 256 + place for place, name in enumerate(_SPECIAL)}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_CONFIG = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "bos_token_id": _IDS["<|endoftext|>"],
    "eos_token_id": _IDS["<|im_end|>"],
    "image_token_id": _IDS["<|image_pad|>"],
    "video_token_id": _IDS["<|video_pad|>"],
    "vision_start_token_id": _IDS["<|vision_start|>"],
    "vision_end_token_id": _IDS["<|vision_end|>"],
    "vision_token_id": _IDS["<|vision_pad|>"],
    "vision_config": {
        "depth": 2,
        "embed_dim": 256,
        "hidden_size": 512,
        "mlp_ratio": 2,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 1003520,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def small_vision(directory: Path, arguments: Mapping[str, Any]) -> Path:
    """The model, one token a byte, with `arguments` in its ``model.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    made = _tokenizer()
    made.save(str(directory / "tokenizer.json"))
    vocabulary = {token: place for token, place in made.get_vocab().items() if place < 256}
    (directory / "merges.txt").write_text("#version: 0.2\n")
    limit = {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    for name, content in {
        "vocab.json": vocabulary,
        "config.json": _CONFIG,
        "preprocessor_config.json": _PREPROCESSOR,
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": _TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": _IDS["<|im_end|>"]},
        "model.json": {"load_format": "dummy", **arguments, **limit},
    }.items():
        (directory / name).write_text(json.dumps(content), "utf-8")
    return directory


def png(color: tuple[int, int, int], width: int = 280, height: int = 140) -> bytes:
    """A PNG of one colour."""
    rows = (b"\0" + bytes(color) * width) * height
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@dataclass(frozen=True)
class Pictures:
    """The checks; `real` if the engine is vLLM, whose double repeats the prompt."""

    client: Client
    phase: Phase
    real: bool

    def all(self) -> None:
        """Run every check; a part that fails does not end the others."""
        parts: list[Callable[[], None]] = [self.answers, self.triton, self.refusals]
        for part in parts:
            name = getattr(part, "__name__", "part")
            try:
                part()
            except Exception as error:  # noqa: BLE001 - the other parts are to be seen, too
                self.check(f"{name} went through", False, f"{type(error).__name__}: {error}")

    def check(self, name: str, holds: bool, seen: object = "") -> None:
        self.phase.check(f"images: {name}", holds, seen)

    def ask(self, *images: bytes, **values: Any) -> dict[str, Any]:
        """An answer to a message with `images`."""
        parts = [{"type": "image_url", "image_url": {"url": _url(data)}} for data in images]
        content = [{"type": "text", "text": "What is it?"}, *parts]
        messages = [{"role": "user", "content": content}]
        asked = {"max_tokens": 64, "ignore_eos": True, "logprobs": True, **values}
        return self.client.openai("chat/completions", messages=messages, **asked)

    def answers(self) -> None:
        """The answer repeats itself, depends on the image, and usage counts its tokens."""
        red, blue = png((255, 0, 0)), png((0, 0, 255))
        told, again, other = self.ask(red), self.ask(red), self.ask(blue)
        self.check("an answer", told["status"] == 200, told)
        same = _log_probs(told) == _log_probs(again)
        self.check("an image repeats itself", same and bool(_log_probs(told)), (told, again))
        self.check("another image differs", _log_probs(told) != _log_probs(other), (told, other))
        text, one = (self._prompt_tokens(self.ask(*images)) for images in ((), (red,)))
        both = self._prompt_tokens(self.ask(red, blue))
        self.check("two images count twice", both - one == one - text, (text, one, both))
        if self.real:  # 10 x 5 squares of 28 pixels, and what is around them
            self.check("tokens of an image", one - text == 52, (text, one))
        room = self.ask(red, max_tokens=4000)
        left = room["usage"]["prompt_tokens"] + room["usage"]["completion_tokens"]
        reason = room["choices"][0]["finish_reason"]
        self.check("the context's room", (left, reason) == (2048, "length"), (left, reason))

    def triton(self) -> None:
        """vllm_model takes an image in base64."""
        text = "<|vision_start|><|image_pad|><|vision_end|>What is it?"
        image = base64.b64encode(png((255, 0, 0))).decode()
        sampling = json.dumps({"max_tokens": 8, "temperature": 0, "ignore_eos": True})
        told = self.client.text(
            text_input=text, image=[image], sampling_parameters=sampling,
            return_num_output_tokens=True, exclude_input_in_output=True,
        )  # fmt: skip
        self.check("vllm_model", told.get("num_output_tokens") == 8, told)

    def refusals(self) -> None:
        """Broken images and too many are refused with a code, and the engine goes on."""
        red = png((255, 0, 0))
        for name, images, code in (
            ("a cut image", [red[: len(red) * 2 // 3]], "E1005"),
            ("too many", [red] * 3, "E1005"),
            ("a thin one", [png((1, 2, 3), 4000, 10)], "E1005"),
        ):
            told = self.ask(*images)
            found = told["status"], told.get("error", {}).get("code")
            self.check(f"{name} is refused", found == (400, code), told)
        self.check("the engine goes on", self.ask(red)["status"] == 200)

    def _prompt_tokens(self, told: Mapping[str, Any]) -> int:
        return int(told["usage"]["prompt_tokens"])


def _url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _log_probs(told: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Tokens of an answer with their log probabilities, which tell images apart sooner."""
    found = told["choices"][0]["logprobs"]["content"]
    return [(item["token"], item["logprob"]) for item in found]


def _tokenizer() -> Tokenizer:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}
    rest = [byte for byte in range(256) if byte not in shown]
    shown |= {byte: chr(256 + place) for place, byte in enumerate(rest)}
    made = Tokenizer(models.BPE({shown[byte]: byte for byte in range(256)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    return made
