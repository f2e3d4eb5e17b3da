"""Triton's responses as JSON objects, and the coded errors behind what is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cog_triton.errors import (
    CogTritonError,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonUnknownError,
)

ToError = Callable[[str], CogTritonError]
"""The coded error behind an error text of the engine or of Triton."""

_decode = json.JSONDecoder().decode  # json.loads guesses the encoding of bytes first


def parse_response(payload: bytes, to_error: ToError) -> dict[str, Any]:
    """A response's outputs by name, tensors flattened; raises its coded error, E2103 or E2104."""
    try:
        event = _decode(payload.decode())
    except ValueError as error:
        raise TritonMalformedJSON(f"not JSON: {excerpt(payload)}") from error
    if not isinstance(event, dict):
        raise TritonMalformedEvent(f"not an object: {excerpt(payload)}")
    if "error" in event:
        raise to_error(str(event["error"]))
    return event


def http_error(status: int, body: bytes, to_error: ToError) -> CogTritonError:
    """The coded error behind an answer whose status is not 200."""
    try:
        return to_error(str(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError):
        return TritonUnknownError(f"Triton answered HTTP {status}: {excerpt(body)}")


def excerpt(raw: bytes) -> str:
    """The beginning of a response, for an error's text."""
    return repr(raw[:200].decode("utf-8", "replace"))
