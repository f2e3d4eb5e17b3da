"""NVIDIA's gRPC clients for token ids and for text: requests and reading of two releases.

Written from reading inflight_batcher_llm_client.py and end_to_end_grpc_client.py of
triton-inference-server/tensorrtllm_backend, v0.7.2 and v0.19. Those of v0.5 and v0.6 send UINT32,
which Triton refuses for a model that declares INT32, as NVIDIA's do since v0.7.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

OLDEST, NEWEST = RELEASES = ("0.7.2", "0.19.0")
_ANSWER_S = 60
_TYPES: dict[type, Any] = {bool: np.bool_, int: np.int32, float: np.float32, str: np.object_}


@dataclass
class TokenRun:
    """What the client prints: ids of all responses, and whether one had none (a stop's answer)."""

    ids: list[int] = field(default_factory=list)
    responses: int = 0
    stops_answered: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass
class TextRun:
    """Text of each prompt, as the client puts it together, and its errors."""

    texts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    responses: int = 0


def _inputs(values: Mapping[str, Any]) -> list[grpcclient.InferInput]:
    """Inputs of shape [1, n] or, of an array, its own."""
    found = []
    for name, value in values.items():
        if not isinstance(value, np.ndarray):
            items = value if isinstance(value, list) else [value]
            raw = [item.encode() if isinstance(item, str) else item for item in items]
            value = np.array([raw], dtype=_TYPES[type(items[0])])
        tensor = grpcclient.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        found.append(tensor)
    return found


def _outputs(names: Iterable[str]) -> list[grpcclient.InferRequestedOutput] | None:
    """Outputs to ask for; none asks for all."""
    return [grpcclient.InferRequestedOutput(name) for name in names] or None


_STOP = {
    "input_ids": np.zeros([1, 1], dtype=np.int32),
    "input_lengths": np.zeros([1, 1], dtype=np.int32),
    "request_output_len": 0,
    "stop": True,
}


def ask_for_tokens(
    url: str,
    release: str,
    prompt: list[int],
    size: int,
    *,
    streaming: bool,
    stop_after_s: float = 0.0,
    stop_via_request_cancel: bool = False,
    requested_outputs: tuple[str, ...] = (),
) -> TokenRun:
    """One run of the client: a request and, after `stop_after_s`, one that stops it."""
    found = TokenRun()
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
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
    if release == OLDEST:
        values |= {"repetition_penalty": 1.0, "presence_penalty": 0.0}
    given = {"outputs": _outputs(requested_outputs), "request_id": "1"}
    stop = {"request_id": "1", "parameters": {"Streaming": streaming}}
    with grpcclient.InferenceServerClient(url) as client:

        def put(result: Any, error: Any) -> None:
            answers.put((result, error))

        if streaming:
            client.start_stream(put)
            client.async_stream_infer("tensorrt_llm", _inputs(values), **given)
            if stop_after_s:
                time.sleep(stop_after_s)
                if stop_via_request_cancel:
                    client.stop_stream(cancel_requests=True)
                else:
                    client.async_stream_infer("tensorrt_llm", _inputs(_STOP), **stop)
            client.stop_stream()
            expected = answers.qsize()
        else:
            future = client.async_infer("tensorrt_llm", _inputs(values), put, **given)
            expected = 1
            if stop_after_s:
                time.sleep(stop_after_s)
                if stop_via_request_cancel:
                    future.cancel()
                else:
                    client.async_infer("tensorrt_llm", _inputs(_STOP), put, **stop)
                    expected += 1
        for _ in range(expected):
            _take_ids(found, *answers.get(timeout=_ANSWER_S), requested_outputs)
    return found


def _take_ids(found: TokenRun, result: Any, error: Any, requested: tuple[str, ...]) -> None:
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
    length = result.as_numpy("sequence_length")[0][0]
    found.ids += ids[0][0][:length].tolist()


def ask_for_text(
    url: str,
    release: str,
    prompts: list[str],
    size: int,
    *,
    model: str = "ensemble",
    streaming: bool = False,
    batch_inputs: bool = False,
    return_log_probs: bool = False,
) -> TextRun:
    """One run of the client."""
    found = TextRun()
    rows = [_text_row(release, prompt, size, streaming, return_log_probs) for prompt in prompts]
    if batch_inputs:
        rows = [{name: np.concatenate([row[name] for row in rows]) for name in rows[0]}]
    names = []
    if release == NEWEST:  # the outputs that are read are asked for by name
        names = ["text_output"]
        names += ["cum_log_probs", "output_log_probs"] if return_log_probs else []
        names += ["batch_index"] if batch_inputs else []
    with grpcclient.InferenceServerClient(url) as client:
        for row in rows:
            answers: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error, q=answers: q.put(error or result))
            client.async_stream_infer(model, _inputs(row), outputs=_outputs(names), request_id="1")
            client.stop_stream()
            texts = [""] * len(row["text_input"])
            while not answers.empty():
                _take_text(found, texts, answers.get(), streaming)
            found.texts += texts
    return found


def _text_row(
    release: str, prompt: str, size: int, streaming: bool, return_log_probs: bool
) -> dict[str, Any]:
    row = {
        "text_input": np.array([[prompt]]).astype(object),
        "max_tokens": np.array([[size]], dtype=np.int32),
        "stream": np.array([[streaming]], dtype=bool),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
    }
    if release == OLDEST:
        row |= {name: np.array([[""]], dtype=object) for name in ("bad_words", "stop_words")}
    else:
        row["exclude_input_in_output"] = np.array([[False]], dtype=bool)
    if return_log_probs:
        row["return_log_probs"] = np.array([[True]], dtype=bool)
    return row


def _take_text(found: TextRun, texts: list[str], answer: Any, streaming: bool) -> None:
    if isinstance(answer, Exception):
        found.errors.append(str(answer))
        return
    found.responses += 1
    index = answer.as_numpy("batch_index")
    place = 0 if index is None else index[0][0]
    text = answer.as_numpy("text_output")[0].decode("utf-8")
    texts[place] = texts[place] + text if streaming else text
