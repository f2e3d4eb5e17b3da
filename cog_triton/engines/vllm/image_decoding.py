"""Images under vLLM: how many a model takes, and their decoding by vLLM's own loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, NamedTuple

from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.engine_errors import coded_error, is_refusal
from cog_triton.engines.vllm.model_directory import VLLMModel
from cog_triton.errors import CogTritonError, InvalidArgument, InvalidPredictorConfig
from cog_triton.pictures.image_limits import FORMATS, ImagePart, read_header

# vllm/config/multimodal.py of 0.33.
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


# vllm/multimodal/processing of 0.33: RuntimeError and AssertionError, and ValueError.
_LACKS_PLACEHOLDERS = ("prompt placeholders", "Failed to apply prompt replacement")
_PROCESSOR_FAILED = "Failed to apply "

Load = Callable[[bytes], Any]


def decode_images(images: Sequence[ImagePart], load: Load) -> list[Any]:
    """The images as vLLM takes them; raises E1005 naming the one that is broken.

    Of an animation it is the first frame. `load` is vLLM's loader of an encoded image.
    """
    decoded = []
    for image in images:
        try:
            _check_dimensions(image.data)
            decoded.append(load(image.data))
        except MemoryError:
            raise
        except Exception as error:  # a decoder fails in any way at broken files
            reason = str(error) if is_refusal(error) else f"{type(error).__name__}: {error}"
            raise InvalidArgument(f"{image.where}: a broken image: {reason[:200]}") from error
    return decoded


def image_error(error: Exception, images: Sequence[ImagePart]) -> CogTritonError:
    """The coded error of what vLLM raised when it put `images` into their prompt."""
    text, first = str(error), images[0].where
    if any(words in text for words in _LACKS_PLACEHOLDERS):
        return InvalidArgument(
            f"{first}: the prompt does not have a placeholder for each of its {len(images)} images"
        )
    if text.startswith(_PROCESSOR_FAILED):
        cause = error.__cause__ or error
        where = first if len(images) == 1 else f"{first} and {len(images) - 1} more"
        return InvalidArgument(f"{where}: not fit for this model: {str(cause)[:200]}")
    return coded_error(error)


def _check_dimensions(data: bytes) -> None:
    """Check that the decoder finds what the header said, which was checked against limits."""
    from PIL import Image  # of vLLM's environment

    with Image.open(BytesIO(data), formats=FORMATS) as opened:
        header = read_header(data)
        if opened.size != (header.width, header.height):
            raise ValueError(f"its header says {header.width}x{header.height}, it is {opened.size}")
