"""NVIDIA's client for text, end_to_end_grpc_client.py: requests and reading of each release.

Written from reading triton-inference-server/tensorrtllm_backend, v0.7.2 to v0.19.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tensors import to_input, to_outputs

RELEASES = ("0.7.2", "0.9.0", "0.12.0", "0.14.0", "0.19.0")


@dataclass
class Run:
    """Text of each prompt, as the client puts it together, and its errors."""

    texts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    responses: int = 0


def run(
    url: str,
    release: str,
    prompts: list[str],
    size: int = 16,
    *,
    model: str = "ensemble",
    streaming: bool = False,
    batch_inputs: bool = False,
    **values: Any,
) -> Run:
    """One run of the client; `values` are more inputs, as its options set them."""
    version = tuple(int(part) for part in release.split("."))
    found = Run()
    rows = [_row(prompt, size, streaming, version, values) for prompt in prompts]
    if batch_inputs:
        rows = [{name: np.concatenate([row[name] for row in rows]) for name in rows[0]}]
    outputs = to_outputs(_outputs(version, batch_inputs, values))
    with grpcclient.InferenceServerClient(url) as client:
        for row in rows:
            answers: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error, q=answers: q.put(error or result))
            inputs = [to_input(name, value) for name, value in row.items()]
            client.async_stream_infer(model, inputs, outputs=outputs, request_id="1")
            client.stop_stream()
            texts = [""] * len(row["text_input"])
            while not answers.empty():
                _take(found, texts, answers.get(), version, streaming)
            found.texts += texts
    return found


def _row(
    prompt: str, size: int, streaming: bool, version: tuple[int, ...], values: dict[str, Any]
) -> dict[str, Any]:
    row = {
        "text_input": np.array([[prompt]]).astype(object),
        "max_tokens": np.array([[size]], dtype=np.int32),
        "stream": np.array([[streaming]], dtype=bool),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
    }
    if version < (0, 9):
        row |= {name: np.array([[""]], dtype=object) for name in ("bad_words", "stop_words")}
    if version >= (0, 19):
        row["exclude_input_in_output"] = np.array([[False]], dtype=bool)
    kinds: dict[type, Any] = {float: np.float32, int: np.int32, bool: bool, str: object}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        row[name] = np.array([items], dtype=kinds[type(items[0])])
    return row


def _outputs(version: tuple[int, ...], batch_inputs: bool, values: dict[str, Any]) -> list[str]:
    """From 0.14 on, the outputs that are read are asked for by name."""
    if version < (0, 14):
        return []
    names = ["text_output"]
    if "return_log_probs" in values:
        names += ["cum_log_probs", "output_log_probs"]
    if values.get("num_return_sequences", 1) > 1:
        names.append("sequence_index")
    return [*names, "batch_index"] if batch_inputs else names


def _take(
    found: Run, texts: list[str], answer: Any, version: tuple[int, ...], streaming: bool
) -> None:
    if isinstance(answer, Exception):
        found.errors.append(str(answer))
        return
    found.responses += 1
    output = answer.as_numpy("text_output")
    index = answer.as_numpy("batch_index")
    asked = not (0, 12) <= version < (0, 14)  # these do not ask whether it is there
    place = 0 if asked and index is None else index[0][0]
    text = output[0].decode("utf-8")
    texts[place] = texts[place] + text if streaming else text
