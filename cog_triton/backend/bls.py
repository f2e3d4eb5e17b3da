"""Triton model ``tensorrt_llm_bls``: streams whole text from the engine it calls.

Each request has a thread, which waits for the engine's responses; one more thread looks for
clients that have gone, because Triton does not hand their leaving down to the engine.
"""

from __future__ import annotations

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

from cog_triton.backend import python_backend
from cog_triton.backend.bls_reply import Reply
from cog_triton.backend.text_inputs import (
    ENGINE_NAMES,
    KNOWN_INPUTS,
    encode_prompt,
    refuse_bias,
    strings,
    word_lists,
)
from cog_triton.engines.tensor_contract import refuse_unknown
from cog_triton.engines.tensorrt_llm import backend_errors
from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnknownError, from_text
from cog_triton.text.tokenizer import EngineTokenizer

Tensors = dict[str, npt.NDArray[Any]]

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_ENGINE_OUTPUTS = ("output_ids", "sequence_length")
_KEEP_S = 5.0
_ONE_ONLY = ("beam_width", "num_return_sequences")


class _Ended:
    """Response iterators that have ended, kept a while.

    Triton's stub (24.10) then drops its reference to them on a thread without the GIL. Were that
    the last one, their tensors would be freed there, which crashes Python 3.12.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Iterator[Any]]] = deque()

    def keep(self, responses: Iterator[Any]) -> None:
        """Free `responses` by `release`, and not before Triton has surely let go of them."""
        self._kept.append((time.monotonic() + _KEEP_S, responses))

    def release(self) -> None:
        """Free what has been kept long enough."""
        while self._kept and self._kept[0][0] < time.monotonic():
            self._kept.popleft()


@dataclass(frozen=True, slots=True)
class _Options:
    tokenizer: EngineTokenizer
    add_special_tokens: bool
    accumulate_tokens: bool
    engine: str
    engine_names: Mapping[str, str]
    end_id: int | None
    pad_id: int | None
    ended: _Ended


class TritonPythonModel:
    """Decoupled: `execute` only starts threads, so requests do not wait for each other."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer; raises E2102 or E1202, which ends tritonserver."""
        parameters = python_backend.Parameters(args)
        self._options = _Options(
            parameters.tokenizer(),
            parameters.flag("add_special_tokens"),
            parameters.flag("accumulate_tokens"),
            parameters.text("tensorrt_llm_model_name"),
            parameters.names("engine_input_names"),
            parameters.token("end_id"),
            parameters.token("pad_id"),
            _Ended(),
        )
        self._check_period = parameters.whole("cancellation_check_period_ms") / 1000
        self._calls: set[_Call] = set()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Start a thread for each request; it sends the responses."""
        for request in requests:
            call = _Call(self._options, request)
            self._calls.add(call)
            threading.Thread(target=self._serve, args=[call], name="request", daemon=True).start()

    def finalize(self) -> None:
        """Stop looking for clients that have gone; Triton has ended all requests before."""
        self._closing.set()
        self._watcher.join()

    def _serve(self, call: _Call) -> None:
        try:
            call.run()
        finally:
            self._calls.discard(call)

    def _watch(self) -> None:
        while not self._closing.wait(self._check_period):
            for call in self._calls.copy():
                call.stop_if_abandoned()
            self._options.ended.release()


class _Call:
    """One client's request and the engine's request behind it."""

    def __init__(self, options: _Options, request: Any) -> None:
        self._options = options
        self._sender = request.get_response_sender()
        # Triton may take the request's memory back when `execute` returns.
        self._inputs: Tensors = {
            name: tensor.copy() for name, tensor in python_backend.input_tensors(request).items()
        }
        self._parameters = python_backend.request_parameters(request)
        self._outputs = [n for n in request.requested_output_names() if n != "text_output"]
        self._engine_id = f"{request.request_id() or 'bls'}-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._answered = False
        self._abandoned = False

    def run(self) -> None:
        """Send all responses, the last one with Triton's final flag."""
        error: CogTritonError = TritonUnknownError("tensorrt_llm_bls failed; see Triton's log")
        try:
            self._generate()
        except CogTritonError as raised:
            error = raised
        finally:
            if not self._answered:
                self._answer(error)

    def stop_if_abandoned(self) -> None:
        """Stop the engine if the client has gone; asks again until the engine has ended."""
        with self._lock:
            if not self._answered:
                self._abandoned = bool(self._sender.is_cancelled())
        if self._abandoned:
            self._stop_engine()

    def _generate(self) -> None:
        prompt_ids, engine_inputs = self._read()
        reply = self._reply(prompt_ids)
        responses = self._engine_responses(engine_inputs)
        for outputs in responses:
            lengths = outputs.pop("sequence_length")
            token_ids = outputs.pop("output_ids").ravel()[: lengths.flat[0]].tolist()
            response = reply.feed(token_ids, outputs)
            if reply.finished:
                self._answer(response or reply.finish())
                self._stop_engine()
                break
            if response and not self._abandoned:
                self._sender.send(python_backend.response(response))
        else:
            self._answer(reply.finish())
        for _ in responses:
            pass

    def _read(self) -> tuple[list[int], Tensors]:
        inputs, options = self._inputs, self._options
        refuse_unknown(self._parameters, KNOWN_INPUTS)
        refuse_bias(inputs.get("embedding_bias_words"), inputs.get("embedding_bias_weights"))
        if inputs["text_input"].size != 1:
            raise InvalidArgument(
                f"text_input: {inputs['text_input'].size} prompts; tensorrt_llm_bls takes one"
            )
        for name in _ONE_ONLY:
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
            text = "".join(item for row in strings(name, inputs.get(name)) for item in row)
            if text or not prefix:
                ids = encode_prompt(
                    options.tokenizer, name, text, add_special_tokens=options.add_special_tokens
                )
                engine[f"{prefix}input_ids"] = np.array([ids], dtype=np.int32)
                engine[f"{prefix}input_lengths"] = np.array([[len(ids)]], dtype=np.int32)
        bad_words = word_lists(options.tokenizer, strings("bad_words", inputs.get("bad_words")))
        if bad_words is not None:
            engine["bad_words_list"] = bad_words
        engine["request_output_len"] = inputs["max_tokens"]
        engine["streaming"] = np.array([[True]])
        return engine["input_ids"][0].tolist(), engine

    def _reply(self, prompt_ids: list[int]) -> Reply:
        streaming = bool(self._scalar("stream", False))
        echo = not (streaming or self._scalar("exclude_input_in_output", False))
        words = strings("stop_words", self._inputs.get("stop_words"))
        return Reply(
            self._options.tokenizer,
            [word for row in words for word in row],
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
                        or backend_errors.of_request(message)
                        or TritonUnknownError(message)
                    )
                if tensors := response.output_tensors():
                    # The response's memory goes back to Triton with the response.
                    yield {tensor.name(): tensor.as_numpy().copy() for tensor in tensors}
        except pb_utils.TritonModelException as error:
            raise TritonUnknownError(str(error)) from error

    def _stop_engine(self) -> None:
        one = np.array([[1]], dtype=np.int32)
        names = ("input_ids", "input_lengths", "request_output_len")
        stop: Tensors = {**dict.fromkeys(names, one), "stop": np.array([[True]])}
        try:
            for _ in self._call_engine(stop, list(_ENGINE_OUTPUTS)):
                pass
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_warn(f"could not stop request {self._engine_id}: {error}")

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
            self._options.ended.keep(responses)

    def _answer(self, last: Tensors | CogTritonError) -> None:
        """Send the last response, if there is one; the sender must not be used after it."""
        with self._lock:
            self._answered = True
            if isinstance(last, CogTritonError):
                self._sender.send(python_backend.failure(last), flags=_FINAL)
            elif last:
                self._sender.send(python_backend.response(last), flags=_FINAL)
            else:
                self._sender.send(flags=_FINAL)

    def _scalar(self, name: str, default: int) -> int:
        tensor = self._inputs.get(name)
        return default if tensor is None else int(tensor.flat[0])
