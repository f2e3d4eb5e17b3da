"""NVIDIA's client for token ids, inflight_batcher_llm_client.py: the requests of each release.

Written from reading triton-inference-server/tensorrtllm_backend, v0.7.2 to v0.19. Those of v0.5 and
v0.6 send UINT32, which Triton refuses for a model that declares INT32, as NVIDIA's do since v0.7.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tensors import to_inputs, to_outputs

RELEASES = ("0.7.2", "0.9.0", "0.12.0", "0.14.0", "0.16.0", "0.19.0")
_ANSWER_S = 60


@dataclass
class Run:
    """What the client prints: ids of all responses, and whether one had none (a stop's answer)."""

    ids: list[int] = field(default_factory=list)
    responses: int = 0
    stops_answered: int = 0
    errors: list[str] = field(default_factory=list)


def _inputs(release: str, prompt: list[int], size: int, streaming: bool) -> dict[str, Any]:
    version = tuple(int(part) for part in release.split("."))
    values = {
        "input_ids": prompt,
        "input_lengths": len(prompt),
        "request_output_len": size,
        "beam_width": 1,
        "temperature": 1.0,
        "streaming": streaming,
        "end_id": -1,
        "pad_id": 2,
        "runtime_top_k": 1,
        "runtime_top_p": 0.0,
    }
    if version < (0, 8):
        values["repetition_penalty"] = 1.0
        values["presence_penalty"] = 0.0
    if version[:2] == (0, 14):
        values |= {"num_return_sequences": 1, "exclude_input_in_output": False}
    return values


_STOP = {
    "input_ids": np.zeros([1, 1], dtype=np.int32),
    "input_lengths": np.zeros([1, 1], dtype=np.int32),
    "request_output_len": 0,
    "stop": True,
}


def run(
    url: str,
    release: str,
    prompt: list[int],
    size: int = 200,
    *,
    streaming: bool,
    request_id: str = "1",
    stop_after_s: float = 0.0,
    stop_via_request_cancel: bool = False,
    requested_outputs: tuple[str, ...] = (),
    model: str = "tensorrt_llm",
) -> Run:
    """One run of the client: a request and, after `stop_after_s`, one that stops it."""
    found = Run()
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    inputs = to_inputs(_inputs(release, prompt, size, streaming))
    outputs = to_outputs(requested_outputs)
    habit = {"parameters": {"Streaming": streaming}}
    with grpcclient.InferenceServerClient(url) as client:

        def put(result: Any, error: Any) -> None:
            answers.put((result, error))

        if streaming:
            client.start_stream(put)
            client.async_stream_infer(model, inputs, outputs=outputs, request_id=request_id)
            if stop_after_s:
                time.sleep(stop_after_s)
                if stop_via_request_cancel:
                    client.stop_stream(cancel_requests=True)
                else:
                    client.async_stream_infer(
                        model, to_inputs(_STOP), request_id=request_id, **habit
                    )
            client.stop_stream()
            expected = answers.qsize()
        else:
            future = client.async_infer(
                model, inputs, put, outputs=outputs, request_id=request_id, **habit
            )
            expected = 1
            if stop_after_s:
                time.sleep(stop_after_s)
                if stop_via_request_cancel:
                    future.cancel()
                else:
                    client.async_infer(model, to_inputs(_STOP), put, request_id=request_id, **habit)
                    expected += 1
        for _ in range(expected):
            _take(found, *answers.get(timeout=_ANSWER_S), requested_outputs)
    return found


def _take(found: Run, result: Any, error: Any, requested: tuple[str, ...]) -> None:
    if error is not None:
        found.errors.append(str(error))
        return
    found.responses += 1
    names = {output.name for output in result.get_response().outputs}
    if requested and names and names != set(requested):
        found.errors.append(f"expected outputs do not match actual outputs: {sorted(names)}")
    ids = result.as_numpy("output_ids")
    if ids is None:
        found.stops_answered += 1
        return
    index = result.as_numpy("sequence_index")
    assert index is None or index[0][0] == 0
    length = result.as_numpy("sequence_length")[0][0]
    found.ids += ids[0][0][:length].tolist()
