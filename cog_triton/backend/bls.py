"""Triton models ``ensemble`` and ``tensorrt_llm_bls``: text by calling the engine's model.

Each prompt has a thread, which waits for the engine's responses; one more thread looks for
disconnected clients.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend, text_inputs, triton_log
from cog_triton.backend.bls_engine import Engine, EngineRequest, OutputType
from cog_triton.backend.bls_responses import PromptResponses, joined
from cog_triton.backend.text_inputs import KNOWN_INPUTS, InputOptions, Prompt, Tensors
from cog_triton.engines.generate_stream import TEXT_MODELS
from cog_triton.engines.tensor_contract import ALIASES, check_parameters
from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnknownError
from cog_triton.text.prompt_encoder import PromptEncoder

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(frozen=True, slots=True)
class _Options:
    inputs: InputOptions
    engine: Engine
    accumulate_tokens: bool


class TritonPythonModel:
    """`execute` only starts threads, so requests do not wait for each other."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer; raises E2102 or E1202, which ends tritonserver."""
        triton_log.install()
        parameters = python_backend.Parameters(args)
        tokenizer = parameters.tokenizer()
        self._options = _Options(
            InputOptions(
                model=args["model_name"],
                tokenizer=tokenizer,
                encoder=PromptEncoder(tokenizer, parameters.count("max_input_len")),
                word_limits=parameters.word_limits(),
                add_special_tokens=parameters.flag("add_special_tokens"),
                engine_names=parameters.names("engine_input_names"),
                end_id=parameters.token_id("end_id"),
                pad_id=parameters.token_id("pad_id"),
                decoupled=parameters.decoupled,
                engine_streams=parameters.flag("engine_streams"),
                excludes_input="exclude_input_in_output" in parameters.inputs,
                takes_bias=parameters.flag("engine_takes_bias"),
            ),
            Engine(
                parameters.text("tensorrt_llm_model_name"),
                {output["name"]: OutputType.of(output) for output in parameters.outputs},
                reports_finish_reason=parameters.flag("reports_finish_reason"),
            ),
            parameters.flag("accumulate_tokens"),
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
            if text_request.is_stop:
                text_request.stop(self._active.copy())
                continue
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
    """One client's request, and the engine requests made for it: one for each of its prompts."""

    def __init__(self, options: _Options, request: Any) -> None:
        self._options = options
        self._sender = request.get_response_sender()
        # Triton may reuse the request's memory when `execute` returns.
        self._inputs: Tensors = {
            name: tensor.copy() for name, tensor in python_backend.input_tensors(request).items()
        }
        self._parameters = python_backend.request_parameters(request)
        self._outputs = list(request.requested_output_names())
        self._id = request.request_id()
        self._line = triton_log.RequestLine(options.inputs.model, self._id)
        self._outcome = "stop"
        self._cancels: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._finished = False
        self._whole: list[Tensors] = []
        self.is_stop = text_inputs.is_stop(self._inputs)

    def run(self) -> None:
        """Send all responses, the last one with Triton's final flag."""
        try:
            self._generate()
        except CogTritonError as error:
            # A name that outlived this block would be a reference cycle, and keep the prompt.
            self._finish(error)
        finally:
            if not self._finished:
                self._finish(TritonUnknownError("a text model failed; see Triton's log"))

    def stop(self, others: set[_TextRequest]) -> None:
        """Stop those with the same id, and answer."""
        if not self._id:
            text = "stop=True: Trying to stop a request but request ID is not provided"
            self._finish(InvalidArgument(text))
            return
        for other in others:
            if other._id == self._id:
                other._stopped = True  # the watcher does it: it may take a round trip
        self._finish({})

    def cancel(self) -> None:
        """Stop the engine; the request ends with the text so far. May need to be repeated."""
        self._stopped = True
        for cancel in self._cancels:
            cancel()

    def cancel_if_disconnected(self) -> None:
        """Cancel the engine requests if the client has disconnected; repeated until they end."""
        with self._lock:
            disconnected = not self._finished and self._sender.is_cancelled()
        if disconnected or self._stopped:
            self.cancel()

    def _generate(self) -> None:
        check_parameters(self._parameters, KNOWN_INPUTS)
        text_inputs.rename(self._inputs, ALIASES)
        prompts = [
            text_inputs.to_prompt(self._options.inputs, row)
            for row in text_inputs.split(self._inputs)
        ]
        self._line.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        if len(prompts) == 1:
            self._finish(self._run(0, prompts[0]))
        else:
            self._run_all(prompts)

    def _run_all(self, prompts: Sequence[Prompt]) -> None:
        with ThreadPoolExecutor(len(prompts), "prompt") as pool:
            runs = [pool.submit(self._run, place, prompt) for place, prompt in enumerate(prompts)]
            try:
                for run in as_completed(runs):
                    self._send(run.result())
            except CogTritonError:
                self.cancel()
                raise
        self._finish({})

    def _run(self, place: int, prompt: Prompt) -> Tensors:
        """Answer a prompt; returns the last response, which is not sent yet."""
        options = self._options
        texts = PromptResponses(
            options.inputs.tokenizer,
            prompt,
            self._outputs,
            batch_index=place,
            accumulate=options.accumulate_tokens,
        )
        outputs = [name for name in self._outputs if name not in text_inputs.OWN_OUTPUTS]
        if prompt.sequences > 1:
            outputs.append("sequence_index")
        engine_id = f"{TEXT_MODELS}{self._id}-{uuid.uuid4().hex}"
        call = options.engine.call(EngineRequest(engine_id, prompt.engine, outputs))
        self._cancels.append(call.cancel)
        last: Tensors = {}
        with closing(call.__iter__()) as responses:
            for response in responses:
                self._send(last)
                last = {}
                answer = texts.feed(response)
                self._line.arrived(texts.tokens)
                self._outcome = response.finish or self._outcome
                if texts.finished:
                    last = answer
                    break
                self._send(answer)
        for answer in texts.finish():
            self._send(last)
            last = answer
        return last

    def _send(self, tensors: Tensors) -> None:
        """Send a response, if there is any; keep it where all are one in the end.

        One at a time: Triton (24.10) mixes up the outputs of responses that are sent at once.
        """
        if not tensors:
            return
        with self._lock:
            if not self._options.inputs.decoupled:
                self._whole.append(tensors)
            else:
                python_backend.send(self._sender, python_backend.response(tensors))

    def _finish(self, last: Tensors | CogTritonError) -> None:
        """Send the final flag, with the last response if any; the sender must not be used after."""
        if not self.is_stop:
            outcome = "cancelled" if self._stopped else self._outcome
            self._line.ended(last if isinstance(last, CogTritonError) else outcome)
        with self._lock:
            self._finished = True
            if isinstance(last, CogTritonError):
                self._sender.send(python_backend.error_response(last), flags=_FINAL)
                return
            decoupled = self._options.inputs.decoupled
            if not decoupled and (self._whole or last):
                self._whole.append(last)
                last = joined([tensors for tensors in self._whole if tensors])
            if last or not decoupled:
                python_backend.send(self._sender, python_backend.response(last), _FINAL)
            else:
                self._sender.send(flags=_FINAL)
