"""HTTP error responses in OpenAI's or Anthropic's shape: the status, and our code in the body."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from starlette.responses import Response

from cog_triton import errors
from cog_triton.errors import CogTritonError, UserError
from cog_triton.serving.openai.response_store import GONE

_log = logging.getLogger(__name__)

_STATUS: dict[type[CogTritonError], int] = {
    errors.Unauthorized: 401,
    errors.NotFound: 404,
    errors.RequestTooLarge: 413,
    # No 5xx: clients and gateways send these again, and the next engine would die of it, too.
    errors.FatalRequest: 422,
    errors.Overloaded: 429,
    errors.TritonUnavailable: 503,
    errors.TritonTimeout: 504,
}
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# OpenAI's own error codes, which its clients search messages for; litellm, for vLLM's words.
_OPENAI_CODES: dict[type[CogTritonError], str] = {
    errors.PromptTooLong: (
        "context_length_exceeded: the prompt is longer than the model's context length"
    ),
    errors.Unauthorized: "invalid_api_key",
    errors.Overloaded: "rate_limit_exceeded",
}
CODE_HEADER = "x-error-code"
"""Header of our own code."""
MESSAGES = "/v1/messages"
"""Anthropic's Messages API."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    MESSAGES: "messages",
    "/v1/embeddings": "embeddings",
}
# Its agents search messages for these words, and shorten the conversation.
_TOO_LONG = "prompt is too long"
RETRY_AFTER_S = {429: "1", 503: "5"}


def endpoint_of(path: str) -> str:
    """Endpoint name for logs and metrics, one of few, so that clients cannot add labels."""
    if path.startswith("/v2/"):
        return "triton"
    if path.startswith("/predictions"):
        return "predictions"
    return _ENDPOINTS.get(path.rstrip("/"), "other")


def status_of(error: CogTritonError) -> int:
    """The HTTP status: 4xx for errors of the caller and of the request, 429 and 503 may pass."""
    return _STATUS.get(type(error), 400 if isinstance(error, UserError) else 500)


def to_coded_error(error: BaseException) -> CogTritonError:
    """`error` itself, or E2100 for an unexpected exception, which is logged."""
    if isinstance(error, CogTritonError):
        return error
    _log.error("unexpected error", exc_info=error)
    return errors.TritonUnknownError(f"internal error: {type(error).__name__}")


def error_body(error: CogTritonError, status: int | None = None, path: str = "") -> dict[str, Any]:
    """The error object of the API of `path`; its message starts with our code.

    It ends with OpenAI's code, or Anthropic's words, if there are any; `code` is OpenAI's then.
    """
    status = status or status_of(error)
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        kind = "invalid_request_error" if status < 500 else "api_error"
        too_long = isinstance(error, errors.PromptTooLong)
        message = f"{error} ({_TOO_LONG})" if too_long else str(error)
        found: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(status, kind), "message": message}
        if _param(error) == "thread":  # its client then goes on without one
            found["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": found}
    openai_code = _OPENAI_CODES.get(type(error))
    if _names_model(error):
        openai_code = "model_not_found"
    if _param(error) == "previous_response_id" and error.detail.endswith(GONE):
        openai_code = "previous_response_not_found"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {
            "message": f"{error} ({openai_code})" if openai_code else str(error),
            "type": kind,
            "param": _param(error),
            "code": openai_code.partition(":")[0] if openai_code else error.code,
        }
    }


def error_response(error: CogTritonError, status: int | None = None, path: str = "") -> Response:
    """The error as a response, see `error_body`; transient errors have a Retry-After header."""
    status = status or status_of(error)
    headers = {CODE_HEADER: error.code}
    if status in RETRY_AFTER_S:
        headers["Retry-After"] = RETRY_AFTER_S[status]
    if isinstance(error, errors.Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error, status, path), status, headers)


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """JSON response in ASCII, so that lone surrogates quoted from a client can be encoded."""
    text = json.dumps(content, separators=(",", ":"))
    return Response(text, status, headers, media_type="application/json")


def _names_model(error: CogTritonError) -> bool:
    return isinstance(error, errors.NotFound) and error.detail.startswith("model=")


def _param(error: CogTritonError) -> str | None:
    """The name of the field at fault, which our messages begin with."""
    if _names_model(error):
        return "model"
    if not isinstance(error, errors.InvalidArgument | errors.BadMessages):
        return None
    name = error.detail.partition(":")[0].partition("=")[0].partition("[")[0].partition(".")[0]
    return name if name.isidentifier() else None
