"""Double of vllm/renderers/base.py: prompts with images.

The placeholder of an image is the model's `image_token_id`, else the character SOH (1). It becomes
a text about the image, so that the answer shows which one it was, and as many placeholders as the
image has tokens, 28 pixels square.
"""

from __future__ import annotations

import asyncio
import zlib
from types import SimpleNamespace
from typing import Any

from vllm.exceptions import VLLMValidationError


class BaseRenderer:
    def __init__(self, vllm_config: Any, tokenizer: Any) -> None:
        self.model_config = vllm_config.model_config
        self.tokenizer = tokenizer
        self._placeholder = self.model_config.image_token_id
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
            if token == self._placeholder and left:
                found += _image_tokens(left.pop(0), token)
            else:
                found.append(token)
        if left:
            raise AssertionError(
                "Failed to apply prompt replacement for"
                f" mm_items['image'][{len(images) - len(left)}]"
            )
        rendered = {"type": "multimodal", "prompt_token_ids": found, "mm_hashes": {}}
        return rendered | {key: prompt[key] for key in ("prompt",) if key in prompt}


def _image_tokens(image: Any, placeholder: int) -> list[int]:
    width, height = image.media.size
    told = f"{width}x{height}:{zlib.crc32(image.media.tobytes()):08x}"
    return [*told.encode(), *[placeholder] * (-(-width // 28) * -(-height // 28))]
