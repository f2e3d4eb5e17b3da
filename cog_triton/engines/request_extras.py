"""Request extras: what a request may ask beyond the tensor contract, as one JSON object.

They travel in the input ``request_extras`` of our private model ``engine_steps``, so that the
published model keeps TensorRT-LLM's inputs.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any, TypeVar

from cog_triton.engines.request import REQUEST, EngineRequest
from cog_triton.errors import InvalidArgument
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.text.sampling import SAMPLING

EXTRAS = "request_extras"
# Of an engine request, and of its sampling parameters.
_FIELDS = tuple(item.name for item in REQUEST if not item.tensor)
_SAMPLING = tuple(item for item in SAMPLING if not item.tensor)
IMAGES = "images"

R = TypeVar("R", bound=EngineRequest)


def encode_extras(request: EngineRequest) -> dict[str, Any]:
    """The input of what a request asks beyond the contract; none if it asks nothing."""
    values = {name: value for name in _FIELDS if (value := getattr(request, name))}
    sampling = request.sampling
    values |= {item.name: value for item in _SAMPLING if (value := getattr(sampling, item.name))}
    if request.images:
        values[IMAGES] = [
            (image.where, base64.b64encode(image.data).decode("ascii")) for image in request.images
        ]
    return {EXTRAS: json.dumps(values)} if values else {}


def decode_extras(request: R, text: str) -> R:
    """`request` with the extras that `encode_extras` wrote; raises E1005."""
    try:
        values = json.loads(text)
        sampling = {
            item.name: item.read(values[item.name]) for item in _SAMPLING if item.name in values
        }
        own = {name: values[name] for name in _FIELDS if name in values}
        if IMAGES in values:
            own[IMAGES] = tuple(
                ImagePart(str(where), base64.b64decode(data)) for where, data in values[IMAGES]
            )
        return replace(request, sampling=replace(request.sampling, **sampling), **own)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{EXTRAS}: malformed: {str(error)[:80]}") from None
