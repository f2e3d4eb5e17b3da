"""Triton model ``vllm_model``: text in and out, with the tensors of Triton's vllm_backend.

The engine is the one that ``tensorrt_llm`` runs; this model is a second client of its host. One
thread receives events and sends responses, one more looks for disconnected clients.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend, triton_log
from cog_triton.backend.vllm_tensors import ParsedRequest, output_tensors, parse_request
from cog_triton.engines.engine_client import EngineClient
from cog_triton.engines.engine_spec import own_addresses
from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.host_messages import EmbeddingRequest, TextEvent, TextRequest
from cog_triton.errors import CogTritonError
from cog_triton.text.prompt_encoder import PromptEncoder

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_TRUE = ("yes", "true")


class TritonPythonModel:
    """Decoupled: `execute` only submits requests, so they do not wait for each other."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start to connect to the engine; raises E1202, which ends tritonserver."""
        triton_log.install()
        parameters = python_backend.Parameters(args)
        self._name = args["model_name"]
        self._types = types_of(parameters.text("vllm_version"))
        self._check_period = parameters.positive_int("cancellation_check_period_ms") / 1000
        self._client = EngineClient(own_addresses(), "tokens")
        self._client.start()
        # vLLM encodes prompts itself, but all of one before it looks at the length.
        self._encoder = PromptEncoder(parameters.tokenizer(), parameters.count("max_input_len"))
        self._images = parameters.image_limits()
        self._embeds = parameters.flag("embeds")
        self._handles = itertools.count(1)
        self._active: dict[int, _TextRequest] = {}
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Submit requests to the engine, whose events send the responses."""
        for request in requests:
            sender = request.get_response_sender()
            line = triton_log.RequestLine(self._name, request.request_id())
            with self._answering_errors(sender, line):
                parsed = parse_request(
                    self._name,
                    python_backend.input_tensors(request),
                    python_backend.request_parameters(request),
                    self._types,
                    takes_images=self._images is not None,
                    embeds=self._embeds,
                )
                if not (parsed.images or self._encoder.is_long(parsed.request.prompt)):
                    self._submit(parsed, sender, line)
                    continue
                threading.Thread(
                    target=self._check_and_submit, args=[parsed, sender, line], daemon=True
                ).start()

    def _check_and_submit(
        self, parsed: ParsedRequest, sender: Any, line: triton_log.RequestLine
    ) -> None:
        with self._answering_errors(sender, line):
            self._encoder.check(parsed.request.prompt)
            if self._images is not None and parsed.images:
                parsed = parsed.with_images(self._images)
            self._submit(parsed, sender, line)

    def _submit(self, parsed: ParsedRequest, sender: Any, line: triton_log.RequestLine) -> None:
        text_request = _TextRequest(next(self._handles), parsed, sender, self._active, line)
        self._active[text_request.handle] = text_request
        try:
            self._client.submit(
                text_request.handle, parsed.request, text_request.emit, _prompt(parsed.request)
            )
        except CogTritonError:
            self._active.pop(text_request.handle, None)
            raise

    @contextmanager
    def _answering_errors(self, sender: Any, line: triton_log.RequestLine) -> Iterator[None]:
        try:
            yield
        except CogTritonError as error:
            line.ended(error)
            sender.send(python_backend.error_response(error), flags=_FINAL)

    def finalize(self) -> None:
        """Stop all threads; Triton has ended all requests before."""
        self._closing.set()
        self._watcher.join()
        self._client.close()

    def _watch(self) -> None:
        while not self._closing.wait(self._check_period):
            for text_request in list(self._active.values()):
                if text_request.is_disconnected():
                    self._client.cancel(text_request.handle)


def _prompt(request: TextRequest | EmbeddingRequest) -> Sequence[int]:
    """What tells prompts apart: token ids, else bytes of the text, as vLLM encodes it itself."""
    ids = request.input_ids if isinstance(request, EmbeddingRequest) else ()
    return ids or request.prompt.encode()


class _TextRequest:
    """One client's request, until its last response is sent."""

    def __init__(
        self,
        handle: int,
        parsed: ParsedRequest,
        sender: Any,
        active: dict[int, _TextRequest],
        line: triton_log.RequestLine,
    ) -> None:
        self.handle = handle
        self._line = line
        self._reason: str | None = None
        self._parsed = parsed
        self._sender = sender
        self._active = active
        self._lock = threading.Lock()
        self._ended = False

    def emit(self, event: Any) -> None:
        """Send the response to an event; the sender must not be used after the last one."""
        ended = event.finish is not None or event.error is not None
        if isinstance(event, TextEvent):  # of one that was cancelled, vLLM tells nothing
            self._line.prompt_tokens = event.input_token_count
            self._line.arrived(sum(event.output_token_counts))
            self._reason = next(filter(None, event.finish_reasons), self._reason)
        if ended:
            self._line.ended(event.error or self._reason or event.finish)
        response = self._response(event)
        with self._lock:
            self._ended = ended
            python_backend.send(self._sender, response, _FINAL if ended else 0)
        if ended:
            self._active.pop(self.handle, None)

    def is_disconnected(self) -> bool:
        """Whether the client has disconnected, as far as Triton knows."""
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def _response(self, event: Any) -> Any:
        if event.error is not None:
            return python_backend.error_response(event.error, "Error generating stream: ")
        if event.finish == "cancelled":
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError("Request was cancelled", pb_utils.TritonError.CANCELLED)
            )
        return python_backend.response(output_tensors(self._parsed, event))
