"""Request extras: what a request may ask beyond the tensor contract, as one JSON object.

They travel in the input ``request_extras`` of our private model ``engine_steps``, so that the
published model keeps TensorRT-LLM's inputs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeVar

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument

EXTRAS = "request_extras"
_FIELDS = ("top_log_probs", "prompt_log_probs")

R = TypeVar("R", bound=EngineRequest)


def encode_extras(request: EngineRequest) -> dict[str, Any]:
    """The input of what a request asks beyond the contract; none if it asks nothing."""
    values = {name: value for name in _FIELDS if (value := getattr(request, name))}
    return {EXTRAS: json.dumps(values)} if values else {}


def decode_extras(request: R, text: str) -> R:
    """`request` with the extras that `encode_extras` wrote; raises E1005."""
    try:
        values = json.loads(text)
        return replace(request, **{name: values[name] for name in _FIELDS if name in values})
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{EXTRAS}: malformed: {str(error)[:80]}") from None
