"""Images that a model takes under vLLM: by its architecture, as vLLM's registry has it."""

from __future__ import annotations

from typing import NamedTuple

from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.model_directory import VLLMModel
from cog_triton.errors import InvalidPredictorConfig

# vllm/config/multimodal.py of 0.26 and 0.33.
_DEFAULT_LIMIT = 999


class ModelImages(NamedTuple):
    """Images of a prompt: how many at most, and what stands for one in text, if that is known."""

    most: int
    placeholder: str | None = None


def images_of(model: VLLMModel, version: str | None) -> ModelImages:
    """The images that vLLM of `version` takes with `model`; none for a model of text."""
    limit = asked_limit(model)
    known = types_of(version).record["image_models"]
    named = [known[name] for name in model.architectures if name in known]
    if not named and not limit:
        return ModelImages(0)
    count = _DEFAULT_LIMIT if limit is None else limit
    if model.arguments.get("language_model_only"):
        count = 0
    return ModelImages(count, named[0] if named else None)


def check_images(model: VLLMModel, limit: int) -> None:
    """Raise E1202 if model.json asks for images, and the loaded engine takes none."""
    asked = asked_limit(model)
    if asked and not limit and not model.arguments.get("language_model_only"):
        names = ", ".join(model.architectures) or "no architecture"
        raise InvalidPredictorConfig(
            f"model.json: limit_mm_per_prompt: image={asked}: vLLM takes no images with this model"
            f" ({names})"
        )


def asked_limit(model: VLLMModel) -> int | None:
    """How many images of a prompt model.json allows; None if it says nothing."""
    limits = model.arguments.get("limit_mm_per_prompt") or {}
    limit = limits.get("image") if isinstance(limits, dict) else None
    count = limit.get("count") if isinstance(limit, dict) else limit
    return count if type(count) is int and count >= 0 else None
