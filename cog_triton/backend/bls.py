"""Triton model ``tensorrt_llm_bls``: streams text by calling the engine model.

Each request has a thread, which waits for the engine's responses; one more thread looks for
disconnected clients.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend, triton_log
from cog_triton.backend.bls_engine import (
    Engine,
    EngineCall,
    EngineRequest,
    OutputType,
    Tensors,
)
from cog_triton.backend.bls_responses import TextResponses
from cog_triton.backend.text_inputs import (
    ENGINE_NAMES,
    KNOWN_INPUTS,
    decode_strings,
    encode_prompt,
    encode_word_lists,
    refuse_bias,
)
from cog_triton.engines.tensor_contract import check_parameters
from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnknownError
from cog_triton.text.prompt_encoder import PromptEncoder
from cog_triton.text.stop_strings import WordLimits
from cog_triton.text.tokenizer import EngineTokenizer

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_MUST_BE_ONE = ("beam_width", "num_return_sequences")


@dataclass(frozen=True, slots=True)
class _Options:
    tokenizer: EngineTokenizer
    encoder: PromptEncoder
    word_limits: WordLimits
    add_special_tokens: bool
    accumulate_tokens: bool
    engine: Engine
    engine_names: Mapping[str, str]
    end_id: int | None
    pad_id: int | None


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
            Engine(
                parameters.text("tensorrt_llm_model_name"),
                {output["name"]: OutputType.of(output) for output in parameters.outputs},
                reports_finish_reason=parameters.flag("reports_finish_reason"),
            ),
            parameters.names("engine_input_names"),
            parameters.token_id("end_id"),
            parameters.token_id("pad_id"),
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
        self._call: EngineCall | None = None
        self._lock = threading.Lock()
        self._finished = False

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
            disconnected = not self._finished and self._sender.is_cancelled()
        if disconnected and self._call is not None:
            self._call.cancel()

    def _generate(self) -> None:
        prompt_ids, engine_inputs = self._engine_inputs()
        text = self._text_responses(prompt_ids)
        request = EngineRequest(self._engine_id, engine_inputs, self._outputs)
        self._call = self._options.engine.call(request)
        with closing(self._call.__iter__()) as responses:
            for response in responses:
                answer = text.feed(response.token_ids, response.outputs)
                if text.finished:
                    self._finish(answer or text.finish())
                    return
                if answer:
                    self._sender.send(python_backend.response(answer))
        self._finish(text.finish())

    def _engine_inputs(self) -> tuple[list[int], Tensors]:
        inputs, options = self._inputs, self._options
        check_parameters(self._parameters, KNOWN_INPUTS)
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
