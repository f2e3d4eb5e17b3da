"""Errors and log of huggingface_hub as coded or transient errors and progress, tokens redacted."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from cog_triton.download.model_request import ModelRequest
from cog_triton.download.retry import TransientError, is_transient
from cog_triton.download.transfer_progress import Echo
from cog_triton.errors import CogTritonError, DiskFull, ModelUnavailable

LIBRARY_ERRORS = (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError, RuntimeError)
"""Exceptions of huggingface_hub, to be given to `coded`."""
OFFLINE = "HF_HUB_OFFLINE is set"


def coded(error: BaseException, request: ModelRequest) -> CogTritonError | TransientError:
    """The error to raise in place of `error`, which came while `request` was fetched."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    # The first cause is the most specific one.
    for one in reversed(found):
        known = _known(one, request)
        if known is not None:
            return known
    text = f"{type(error).__name__}: {error}"
    return ModelUnavailable(f"{request.model_id}: {redact_tokens(text, request.token)}")


def _known(error: BaseException, request: ModelRequest) -> CogTritonError | TransientError | None:
    name, hub = request.model_id, constants.ENDPOINT
    token = request.token or get_token()
    if isinstance(error, GatedRepoError):
        with_token = "the token's account" if token else "your account, and give its hf_token"
        return ModelUnavailable(
            f"{name} is gated: accept its licence at {hub}/{name} with {with_token}"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelUnavailable(f"{name} has no revision {request.revision or 'main'!r} on {hub}")
    if isinstance(error, RepositoryNotFoundError):
        return _not_found(name, hub, token)
    if isinstance(error, DisabledRepoError):
        return ModelUnavailable(f"{name} has been disabled on {hub}")
    if isinstance(error, HFValidationError):
        return ModelUnavailable(f"model_id {name!r} is no Hugging Face model's: must be ORG/NAME")
    if isinstance(error, HfHubHTTPError):
        return _status(error.response.status_code, name, hub, token)
    if isinstance(error, OfflineModeIsEnabled):
        return TransientError(OFFLINE)
    if isinstance(error, httpx2.TransportError):
        text = redact_tokens(str(error) or type(error).__name__, request.token)
        return TransientError(f"{hub} is unreachable: {text}")
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"{name}: {constants.HF_HUB_CACHE} is full")
        if "Consistency check failed" in str(error):
            return TransientError("a file came in with another size than the hub gave")
    return None


def _not_found(name: str, hub: str, token: str | None) -> ModelUnavailable:
    may = "or the token may not read it" if token else "or it is private: give hf_token"
    return ModelUnavailable(f"{hub} has no model {name}, {may}")


def _status(status: int, name: str, hub: str, token: str | None) -> CogTritonError | TransientError:
    if is_transient(status):
        return TransientError(f"{hub} answers HTTP {status}")
    if status == 401 and token:
        return ModelUnavailable(f"{name}: {hub} does not take the hf_token (HTTP 401)")
    if status == 403:
        return ModelUnavailable(f"{name}: {hub} does not let this hf_token read it (HTTP 403)")
    if status in (401, 404):
        return _not_found(name, hub, token)
    return ModelUnavailable(f"{name}: {hub} answers HTTP {status}")


def redact_tokens(text: str, token: str | None) -> str:
    """`text` with every hub token of this request and machine replaced."""
    for secret in {token, get_token()} - {None, ""}:
        text = text.replace(str(secret), "***")
    return text


@contextmanager
def relayed_log(echo: Echo, request: ModelRequest) -> Iterator[None]:
    """Relays the library's log to `echo`, tokens redacted, in place of stderr."""

    class Relay(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = redact_tokens(record.getMessage(), request.token)
            echo(f"[download] {request.model_id}: {' '.join(text.split())}")

    logger = logging.getLogger("huggingface_hub")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [Relay()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before
