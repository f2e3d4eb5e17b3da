"""Input ``embedding_request`` of ``vllm_model``: a JSON object, as vllm_backend takes it."""

from __future__ import annotations

from typing import Any

from cog_triton.engines.vllm.host_messages import EmbeddingRequest
from cog_triton.errors import InvalidArgument, PromptRequired, nearest
from cog_triton.text import client_json

NAME = "embedding_request"
_KNOWN = ("input", "pooling_params")
# Of OpenAI's request: they change no number.
_WITHOUT_EFFECT = ("model", "user", "encoding_format")


def parse_embedding_request(text: str) -> EmbeddingRequest:
    """The request; raises E1001 and E1005.

    `input` is a text or a list of token ids; ``pooling_params.dimensions`` is a number, or a list
    of one.
    """
    try:
        values = client_json.parse(text)
    except ValueError as error:
        raise InvalidArgument(f"{NAME}: not JSON: {error}") from error
    _check_names(values, NAME, (*_KNOWN, *_WITHOUT_EFFECT))
    given = values.get("input")
    if given in ("", [], None):
        raise PromptRequired(f"{NAME}: input is empty")
    dimensions = _dimensions(values.get("pooling_params"))
    if isinstance(given, str):
        return EmbeddingRequest(prompt=given, dimensions=dimensions)
    if isinstance(given, list) and all(type(token) is int for token in given):
        return EmbeddingRequest(input_ids=tuple(given), dimensions=dimensions)
    raise InvalidArgument(f"{NAME}: input: must be a text, or a list of token ids")


def _dimensions(params: Any) -> int | None:
    if params is None:
        return None
    _check_names(params, f"{NAME}: pooling_params", ("dimensions",))
    given = params.get("dimensions")
    found = given[0] if isinstance(given, list) and len(given) == 1 else given
    if found is None or (type(found) is int and found > 0):
        return found
    raise InvalidArgument(
        f"{NAME}: pooling_params: dimensions={str(given)[:80]}: must be a whole number, at least 1"
    )


def _check_names(values: Any, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(values, dict):
        raise InvalidArgument(f"{where}: must be a JSON object")
    for name in values:
        if name not in known:
            hint = nearest(name, list(known)) or f"; known: {', '.join(known)}"
            raise InvalidArgument(f"{where}: {name[:80]}: not taken{hint}")
