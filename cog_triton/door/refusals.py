"""HTTP statuses of errors, and their shape in each of the APIs behind the door."""

from __future__ import annotations

from cog_triton import errors
from cog_triton.door.message import Answer, json_answer
from cog_triton.errors import CogTritonError
from cog_triton.serving.openai import error_responses

_RETRY_AFTER_S = {503: b"5"}


def status_of(error: CogTritonError) -> int:
    """The HTTP status: 4xx for errors of the caller, 503 for transient ones."""
    if isinstance(error, errors.Overloaded):
        return 503
    return error_responses.status_of(error)


def triton_refusal(status: int, error: CogTritonError) -> Answer:
    """An error as Triton's HTTP API words it."""
    return json_answer(status, {"error": str(error)}, *_headers(status))


def cog_refusal(status: int, error: CogTritonError) -> Answer:
    """An error as Cog's HTTP API words it, those of predictions included."""
    body = {"error": str(error), "status": "failed"}
    return json_answer(status, body, *_headers(status))


def openai_refusal(status: int, error: CogTritonError) -> Answer:
    """An error as the OpenAI API words it."""
    return json_answer(status, error_responses.error_body(error, status), *_headers(status))


def _headers(status: int) -> list[tuple[bytes, bytes]]:
    if status == 401:
        return [(b"www-authenticate", b"Bearer")]
    return [(b"retry-after", after)] if (after := _RETRY_AFTER_S.get(status)) else []
