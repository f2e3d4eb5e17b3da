"""Image decoding in vLLM's host: by vLLM's own loader, of the formats that are served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from cog_triton.engines.vllm.engine_errors import coded_error, is_refusal
from cog_triton.errors import CogTritonError, InvalidArgument
from cog_triton.pictures.image_header import FORMATS, read_header
from cog_triton.pictures.image_limits import ImagePart

# vllm/multimodal/processing of 0.26 and 0.33: RuntimeError and AssertionError, and ValueError.
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
