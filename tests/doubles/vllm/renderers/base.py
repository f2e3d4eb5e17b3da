"""Double of vllm/renderers/base.py: prompts with images.

The placeholder of an image is the character SOH (1); each becomes as many of them as the image has
tokens, 28 pixels square, and then a text about it, so that the answer shows which image it was.
"""

from __future__ import annotations

import asyncio
import zlib
from types import SimpleNamespace
from typing import Any

from vllm.exceptions import VLLMValidationError

PLACEHOLDER = 1


class BaseRenderer:
    def __init__(self, vllm_config: Any, tokenizer: Any) -> None:
        self.model_config = vllm_config.model_config
        self.tokenizer = tokenizer
        self.mm_processor: Any = None
        if self.model_config.most_images is not None:
            limits = {"image": self.model_config.most_images}
            self.mm_processor = SimpleNamespace(info=SimpleNamespace(allowed_mm_limits=limits))

    async def render_cmpl_async(
        self,
        prompts: list[dict[str, Any]],
        tok_params: Any = None,
        *,
        prompt_extras: dict[str, Any] | None = None,
        skip_mm_cache: bool = False,
    ) -> list[dict[str, Any]]:
        return [await asyncio.to_thread(self._process, prompt) for prompt in prompts]

    def _process(self, prompt: dict[str, Any]) -> dict[str, Any]:
        images = prompt["multi_modal_data"]["image"]
        if self.mm_processor is None:
            raise ValueError("Multi-modal processor not available for text-only models")
        limit = self.mm_processor.info.allowed_mm_limits["image"]
        if len(images) > limit:
            raise VLLMValidationError(f"At most {limit} image(s) may be provided in one prompt.")
        ids = prompt.get("prompt_token_ids")
        if ids is None:
            ids = self.tokenizer.encode(prompt["prompt"]).ids
        if any(max(item.media.size) > 200 * min(item.media.size) for item in images):
            cause = ValueError("absolute aspect ratio must be smaller than 200, got 400.0")
            raise ValueError(f"Failed to apply Qwen2VLProcessor on data={images}") from cause
        found, left = [], list(images)
        for token in ids:
            found += _image_tokens(left.pop(0)) if token == PLACEHOLDER and left else [token]
        if left:
            raise AssertionError(
                "Failed to apply prompt replacement for"
                f" mm_items['image'][{len(images) - len(left)}]"
            )
        rendered = {"type": "multimodal", "prompt_token_ids": found, "mm_hashes": {}}
        return rendered | {key: prompt[key] for key in ("prompt",) if key in prompt}


def _image_tokens(image: Any) -> list[int]:
    width, height = image.media.size
    told = f"{width}x{height}:{zlib.crc32(image.media.tobytes()):08x}"
    return [*told.encode(), *[PLACEHOLDER] * (-(-width // 28) * -(-height // 28))]
