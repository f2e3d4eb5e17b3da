"""Triton model ``tensorrt_llm_bls``: streams text by calling the engine model.

Each request has a thread, which waits for the engine's responses; one more thread looks for
disconnected clients, because Triton does not pass their cancellation on to the engine.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend, triton_log
from cog_triton.backend.bls_responses import TextResponses
from cog_triton.backend.text_inputs import (
    ENGINE_NAMES,
    KNOWN_INPUTS,
    decode_strings,
    encode_prompt,
    encode_word_lists,
    refuse_bias,
)
from cog_triton.engines.tensor_contract import refuse_unknown
from cog_triton.engines.tensorrt_llm import backend_errors
from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnknownError, from_text
from cog_triton.text.prompt_encoder import PromptEncoder
from cog_triton.text.stop_strings import WordLimits
from cog_triton.text.tokenizer import EngineTokenizer

_log = logging.getLogger(__name__)

Tensors = dict[str, npt.NDArray[Any]]

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_ENGINE_OUTPUTS = ("output_ids", "sequence_length")
_RELEASE_DELAY_S = 5.0
_MUST_BE_ONE = ("beam_width", "num_return_sequences")


class _DelayedRelease:
    """Delayed release of ended response iterators: workaround for a crash in Triton's stub.

    The stub (24.10) drops its reference to them on a thread without the GIL. If that were the last
    one, their tensors would be freed there, which crashes Python 3.12.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Iterator[Any]]] = deque()

    def keep(self, responses: Iterator[Any]) -> None:
        """Keep `responses` until Triton has certainly dropped its reference."""
        self._kept.append((time.monotonic() + _RELEASE_DELAY_S, responses))

    def release(self) -> None:
        """Release what has been kept long enough."""
        while self._kept and self._kept[0][0] < time.monotonic():
            self._kept.popleft()


@dataclass(frozen=True, slots=True)
class _Options:
    tokenizer: EngineTokenizer
    encoder: PromptEncoder
    word_limits: WordLimits
    add_special_tokens: bool
    accumulate_tokens: bool
    engine: str
    engine_names: Mapping[str, str]
    end_id: int | None
    pad_id: int | None
    delayed_release: _DelayedRelease


class TritonPythonModel:
    """Decoupled: `execute` only starts threads, so requests do not wait for each other."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer; raises E2102 or E1202, which ends tritonserver."""
        triton_log.install()
        parameters = python_backend.Parameters(args)
        tokenizer = parameters.tokenizer()
        self._options = _Options(
            tokenizer,
            PromptEncoder(tokenizer, parameters.count("max_input_len")),
            parameters.word_limits(),
            parameters.flag("add_special_tokens"),
            parameters.flag("accumulate_tokens"),
            parameters.text("tensorrt_llm_model_name"),
            parameters.names("engine_input_names"),
            parameters.token_id("end_id"),
            parameters.token_id("pad_id"),
            _DelayedRelease(),
        )
        self._check_period = parameters.positive_int("cancellation_check_period_ms") / 1000
        self._active: set[_TextRequest] = set()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Start a thread for each request; it sends the responses."""
        for request in requests:
            text_request = _TextRequest(self._options, request)
            self._active.add(text_request)
            threading.Thread(
                target=self._serve, args=[text_request], name="request", daemon=True
            ).start()

    def finalize(self) -> None:
        """Stop the watcher; Triton has ended all requests before."""
        self._closing.set()
        self._watcher.join()

    def _serve(self, text_request: _TextRequest) -> None:
        try:
            text_request.run()
        finally:
            self._active.discard(text_request)

    def _watch(self) -> None:
        while not self._closing.wait(self._check_period):
            for text_request in self._active.copy():
                text_request.cancel_if_disconnected()
            self._options.delayed_release.release()


class _TextRequest:
    """One client's request, and the engine request made for it."""

    def __init__(self, options: _Options, request: Any) -> None:
        self._options = options
        self._sender = request.get_response_sender()
        # Triton may reuse the request's memory when `execute` returns.
        self._inputs: Tensors = {
            name: tensor.copy() for name, tensor in python_backend.input_tensors(request).items()
        }
        self._parameters = python_backend.parameter_names(request)
        self._outputs = [n for n in request.requested_output_names() if n != "text_output"]
        self._engine_id = f"{request.request_id() or 'bls'}-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._finished = False
        self._disconnected = False

    def run(self) -> None:
        """Send all responses, the last one with Triton's final flag."""
        error: CogTritonError = TritonUnknownError("tensorrt_llm_bls failed; see Triton's log")
        try:
            self._generate()
        except CogTritonError as raised:
            error = raised
        finally:
            if not self._finished:
                self._finish(error)

    def cancel_if_disconnected(self) -> None:
        """Cancel the engine request if the client has disconnected; repeated until it has ended."""
        with self._lock:
            if not self._finished:
                self._disconnected = bool(self._sender.is_cancelled())
        if self._disconnected:
            self._cancel_engine_request()

    def _generate(self) -> None:
        prompt_ids, engine_inputs = self._engine_inputs()
        text = self._text_responses(prompt_ids)
        responses = self._engine_responses(engine_inputs)
        for outputs in responses:
            lengths = outputs.pop("sequence_length")
            token_ids = outputs.pop("output_ids").ravel()[: lengths.flat[0]].tolist()
            response = text.feed(token_ids, outputs)
            if text.finished:
                self._finish(response or text.finish())
                self._cancel_engine_request()
                break
            if response and not self._disconnected:
                self._sender.send(python_backend.response(response))
        else:
            self._finish(text.finish())
        for _ in responses:
            pass

    def _engine_inputs(self) -> tuple[list[int], Tensors]:
        inputs, options = self._inputs, self._options
        refuse_unknown(self._parameters, KNOWN_INPUTS)
        refuse_bias(inputs.get("embedding_bias_words"), inputs.get("embedding_bias_weights"))
        if inputs["text_input"].size != 1:
            raise InvalidArgument(
                f"text_input: {inputs['text_input'].size} prompts; tensorrt_llm_bls takes one"
            )
        for name in _MUST_BE_ONE:
            if self._scalar(name, 1) > 1:
                raise InvalidArgument(
                    f"{name}={self._scalar(name, 1)}: must be 1 in tensorrt_llm_bls;"
                    " tensorrt_llm takes more"
                )
        engine: Tensors = {
            ENGINE_NAMES[name]: tensor for name, tensor in inputs.items() if name in ENGINE_NAMES
        }
        engine |= {
            options.engine_names[name]: engine.pop(name)
            for name in options.engine_names.keys() & engine.keys()
        }
        for name, token in (("end_id", options.end_id), ("pad_id", options.pad_id)):
            if name in inputs:
                engine[name] = inputs[name]
            elif token is not None:
                engine[name] = np.array([[token]], dtype=np.int32)
        for name, prefix in (("text_input", ""), ("decoder_text_input", "decoder_")):
            text = "".join(item for row in decode_strings(name, inputs.get(name)) for item in row)
            if text or not prefix:
                ids = encode_prompt(
                    options.encoder, name, text, add_special_tokens=options.add_special_tokens
                )
                engine[f"{prefix}input_ids"] = np.array([ids], dtype=np.int32)
                engine[f"{prefix}input_lengths"] = np.array([[len(ids)]], dtype=np.int32)
        bad_words = encode_word_lists(options.tokenizer, self._words("bad_words"))
        if bad_words is not None:
            engine["bad_words_list"] = bad_words
        engine["request_output_len"] = inputs["max_tokens"]
        engine["streaming"] = np.array([[True]])
        return engine["input_ids"][0].tolist(), engine

    def _text_responses(self, prompt_ids: list[int]) -> TextResponses:
        streaming = bool(self._scalar("stream", False))
        echo = not (streaming or self._scalar("exclude_input_in_output", False))
        return TextResponses(
            self._options.tokenizer,
            [word for row in self._words("stop_words") for word in row],
            min_tokens=self._scalar("min_tokens", 0),
            streaming=streaming,
            accumulate=self._options.accumulate_tokens,
            prompt_ids=prompt_ids if echo else (),
        )

    def _engine_responses(self, inputs: Tensors) -> Iterator[Tensors]:
        """The outputs of each engine response that has any; raises the engine's error."""
        try:
            for response in self._call_engine(inputs, [*_ENGINE_OUTPUTS, *self._outputs]):
                if response.has_error():
                    message = response.error().message()
                    raise (
                        from_text(message)
                        or backend_errors.request_error(message)
                        or TritonUnknownError(message)
                    )
                if tensors := response.output_tensors():
                    # The response's memory goes back to Triton with the response.
                    yield {tensor.name(): tensor.as_numpy().copy() for tensor in tensors}
        except pb_utils.TritonModelException as error:
            raise TritonUnknownError(str(error)) from error

    def _cancel_engine_request(self) -> None:
        one = np.array([[1]], dtype=np.int32)
        names = ("input_ids", "input_lengths", "request_output_len")
        stop: Tensors = {**dict.fromkeys(names, one), "stop": np.array([[True]])}
        try:
            for _ in self._call_engine(stop, list(_ENGINE_OUTPUTS)):
                pass
        except pb_utils.TritonModelException as error:
            _log.warning("could not stop request %s: %s", self._engine_id, error)

    def _call_engine(self, inputs: Tensors, outputs: list[str]) -> Iterator[Any]:
        request = pb_utils.InferenceRequest(
            model_name=self._options.engine,
            request_id=self._engine_id,
            inputs=[pb_utils.Tensor(name, tensor) for name, tensor in inputs.items()],
            requested_output_names=outputs,
        )
        responses: Iterator[Any] = request.exec(decoupled=True)
        try:
            yield from responses
        finally:
            self._options.delayed_release.keep(responses)

    def _finish(self, last: Tensors | CogTritonError) -> None:
        """Send the final flag, with the last response if any; the sender must not be used after."""
        with self._lock:
            self._finished = True
            if isinstance(last, CogTritonError):
                self._sender.send(python_backend.error_response(last), flags=_FINAL)
            elif last:
                self._sender.send(python_backend.response(last), flags=_FINAL)
            else:
                self._sender.send(flags=_FINAL)

    def _words(self, name: str) -> list[list[str]]:
        rows = decode_strings(name, self._inputs.get(name))
        for row in rows:
            self._options.word_limits.check(name, row)
        return rows

    def _scalar(self, name: str, default: int) -> int:
        tensor = self._inputs.get(name)
        return default if tensor is None else int(tensor.flat[0])
