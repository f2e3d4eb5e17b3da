"""Triton model ``draft_target``: a draft engine proposes tokens, and the target verifies them.

Each round, the draft continues the text so far by a few tokens, which the target gets as
draft_input_ids: it answers with those that it would have made itself, and one more. The text is the
target's own. Both engines keep the text's keys and values for the next round. A request that is not
drafted goes to the target as it is.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend, triton_log
from cog_triton.backend.bls_engine import Engine, EngineCall, EngineRequest, OutputType
from cog_triton.backend.bls_inputs import Tensors
from cog_triton.backend.bls_responses import EngineResponse
from cog_triton.backend.draft_rounds import Engines, Generation, is_drafted, is_set, number
from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnknownError

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_OWN = ("output_ids", "sequence_length", "sequence_index")
_COUNTS = ("total_accepted_draft_tokens", "total_draft_tokens", "acceptance_rate")


class TritonPythonModel:
    """`execute` only starts threads, so requests do not wait for each other."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the parameters; raises E1202, which ends tritonserver."""
        triton_log.install()
        parameters = python_backend.Parameters(args)
        types = {output["name"]: OutputType.of(output) for output in parameters.outputs}
        self._engines = Engines(
            Engine("tensorrt_llm", types, reports_finish_reason=False),
            Engine("tensorrt_llm_draft", {}, reports_finish_reason=False),
            parameters.positive_int("num_draft_tokens"),
            parameters.positive_int("max_input_len"),
            parameters.flag("excludes_input"),
        )
        self._decoupled = parameters.decoupled
        self._period = parameters.positive_int("cancellation_check_period_ms") / 1000
        self._active: set[_Request] = set()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Start a thread for each request; it sends the responses."""
        for request in requests:
            ours = _Request(self._engines, request, streams=self._decoupled)
            if ours.is_stop:
                ours.stop(self._active.copy())
                continue
            self._active.add(ours)
            threading.Thread(target=self._serve, args=[ours], name="request", daemon=True).start()

    def finalize(self) -> None:
        """Stop the watcher; Triton has ended all requests before."""
        self._closing.set()
        self._watcher.join()

    def _serve(self, ours: _Request) -> None:
        try:
            ours.run()
        finally:
            self._active.discard(ours)

    def _watch(self) -> None:
        while not self._closing.wait(self._period):
            for ours in self._active.copy():
                ours.cancel_if_left()


class _Request:
    """One client's request, drafted or passed on."""

    def __init__(self, engines: Engines, request: Any, *, streams: bool) -> None:
        self._engines = engines
        self._sender = request.get_response_sender()
        # Triton may reuse the request's memory when `execute` returns.
        self._inputs: Tensors = {
            name: tensor.copy() for name, tensor in python_backend.input_tensors(request).items()
        }
        self._outputs = [name for name in request.requested_output_names() if name not in _OWN]
        self._id = request.request_id()
        stop = self._inputs.pop("stop", None)
        self.is_stop = stop is not None and bool(stop.any())
        self._streams = streams and bool(self._inputs.get("streaming", np.zeros(1)).any())
        self._work: Generation | EngineCall | None = None
        self._lock = threading.Lock()
        self._left = self._finished = False

    def run(self) -> None:
        """Send all responses, the last one with Triton's final flag."""
        failure: CogTritonError | None = TritonUnknownError("a draft failed; see Triton's log")
        try:
            if len(self._inputs["input_ids"]) != 1:
                raise InvalidArgument("input_ids: must be of one request: the model is private")
            if is_drafted(self._inputs):
                self._draft()
            else:
                self._pass_on()
            failure = None
        except CogTritonError as error:
            failure = error
        finally:
            self._finish(failure)

    def stop(self, others: set[_Request]) -> None:
        """Stop those with the same id, and answer."""
        for other in others if self._id else ():
            if other._id == self._id:
                other._left = True  # the watcher does it: it may take a round trip
        text = "stop=True: Trying to stop a request but request ID is not provided"
        self._finish(None if self._id else InvalidArgument(text))

    def cancel_if_left(self) -> None:
        """Stop the engines if the client has gone, or asked for it; repeated until they end."""
        with self._lock:
            self._left = self._left or (not self._finished and self._sender.is_cancelled())
        if self._left and self._work is not None:
            self._work.cancel()

    def _draft(self) -> None:
        generation = Generation(self._engines, self._inputs)
        self._work = generation
        echo = not (self._excluded() or self._streams)
        whole: list[int] = self._inputs["input_ids"].ravel().tolist() if echo else []
        for found in generation.rounds():
            if self._streams:
                self._send([found], self._counts(generation))
            whole += found
        if not self._streams:
            self._send([whole], self._counts(generation))

    def _pass_on(self) -> None:
        engine_id = f"{self._id or 'draft'}-{uuid.uuid4().hex}"
        outputs = list(self._outputs)
        if number(self._inputs, "num_return_sequences", 1) > 1:
            outputs.append("sequence_index")
        call = self._engines.target.call(EngineRequest(engine_id, self._inputs, outputs))
        self._work = call
        for response in call:
            self._send(response.beams, self._also(response))

    def _also(self, response: EngineResponse) -> Tensors:
        index = np.array([[response.sequence_index]], np.int32)
        many = number(self._inputs, "num_return_sequences", 1) > 1
        return {**response.outputs, **({"sequence_index": index} if many else {})}

    def _excluded(self) -> bool:
        return is_set(self._inputs, "exclude_input_in_output")

    def _counts(self, generation: Generation) -> Tensors:
        accepted, proposed = generation.accepted, generation.proposed
        rate = np.array([[accepted / max(1, proposed)]], np.float32)
        values = (np.array([[accepted]], np.int32), np.array([[proposed]], np.int32), rate)
        found = dict(zip(_COUNTS, values, strict=True))
        return {name: tensor for name, tensor in found.items() if name in self._outputs}

    def _send(self, rows: Sequence[Sequence[int]], others: Tensors) -> None:
        longest = max(map(len, rows))
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        tensors = {
            "output_ids": np.array([padded], np.int32),
            "sequence_length": np.array([[len(row) for row in rows]], np.int32),
            **others,
        }
        with self._lock:
            python_backend.send(self._sender, python_backend.response(tensors))

    def _finish(self, failure: CogTritonError | None) -> None:
        """Send the final flag; the sender must not be used after."""
        with self._lock:
            self._finished = True
            if failure is not None:
                self._sender.send(python_backend.error_response(failure), flags=_FINAL)
            else:
                self._sender.send(flags=_FINAL)
