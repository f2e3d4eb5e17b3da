"""Double of vllm/exceptions.py."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


class VLLMError(Exception):
    pass


class VLLMClientError(VLLMError):
    pass


class VLLMServerError(VLLMError):
    pass


class GenerationError(VLLMServerError):
    pass


class RetryableRequestError(GenerationError):
    pass


class GracefulHTTPError(VLLMError):
    def __init__(self, message: str, http_status: HTTPStatus) -> None:
        super().__init__(message)
        self.http_status = http_status


class QueueOverflowError(GracefulHTTPError):
    def __init__(self) -> None:
        busy = "The engine is currently busy and cannot accept new requests."
        super().__init__(busy, HTTPStatus.SERVICE_UNAVAILABLE)


class VLLMValidationError(VLLMClientError):
    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value
