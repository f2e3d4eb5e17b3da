"""Requests of tensorrt_llm_bls to the engine: values and shapes over HTTP, ends and stops."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scripted_server import HANG, PATIENCE_S, ScriptedServer, event, serving, stream

from cog_triton.errors import TritonMalformedEvent

OUTPUTS = (
    {"name": "output_log_probs", "data_type": "TYPE_FP32", "dims": [-1, -1]},
    {"name": "cum_log_probs", "data_type": "TYPE_FP32", "dims": [-1]},
    {"name": "num_output_tokens", "data_type": "TYPE_INT32", "dims": [1]},
)
INPUTS = {
    "input_ids": np.array([[1, 2]], dtype=np.int32),
    "streaming": np.array([[True]]),
}
DTYPES = {"TYPE_FP32": np.float32, "TYPE_INT32": np.int32}


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    stand_in = ModuleType("triton_python_backend_utils")
    vars(stand_in).update(triton_string_to_numpy=DTYPES.__getitem__)
    name = "cog_triton.backend.triton_engine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stand_in.__name__, stand_in)
        sys.modules.pop(name, None)
        try:
            yield importlib.import_module(name)
        finally:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_HTTP_PORT", "1")


def call(module: Any, server: ScriptedServer, **inputs: Any) -> Any:
    os.environ["TRITON_HTTP_PORT"] = str(urlsplit(server.url).port)
    engine = module.TritonEngine("tensorrt_llm", OUTPUTS)
    names = [output["name"] for output in OUTPUTS]
    return engine.call(module.ModelRequest("a-1", {**INPUTS, **inputs}, names))


def token(**outputs: Any) -> bytes:
    return event(output_ids=7, sequence_length=1, **outputs)


def test_outputs_get_their_types_and_shapes_back(module: Any) -> None:
    first = event(
        output_ids=[5, 6, 0], sequence_length=2, output_log_probs=[-0.5, -1.5], cum_log_probs=-2.0
    )
    last = token(num_output_tokens=3, batch_index=0)
    with serving(stream(first, last)) as server:
        one, two = call(module, server)
    assert one.beams == [[5, 6]]
    assert two.beams == [[7]]
    assert {n: (t.dtype, t.tolist()) for n, t in one.outputs.items()} == {
        "output_log_probs": (np.float32, [[[-0.5, -1.5]]]),
        "cum_log_probs": (np.float32, [[-2.0]]),
    }
    assert list(two.outputs) == ["num_output_tokens"]
    assert two.outputs["num_output_tokens"].tolist() == [[3]]


@given(
    st.sampled_from([np.float32, np.uint64, np.int32, np.bool_]).flatmap(
        lambda dtype: arrays.arrays(dtype, st.integers(0, 5))
    )
)
def test_numbers_survive_json_exactly(module: Any, tensor: npt.NDArray[Any]) -> None:
    values = json.loads(json.dumps(module._json_value("x", tensor)))
    again = np.array(values, dtype=tensor.dtype)
    assert np.array_equal(again, tensor, equal_nan=tensor.dtype == np.float32)


def test_a_response_without_tokens_is_refused(module: Any) -> None:
    with serving(stream(event(output_ids=7))) as server, pytest.raises(TritonMalformedEvent):
        list(call(module, server))
    with serving(stream(token(cum_log_probs="x"))) as server, pytest.raises(TritonMalformedEvent):
        list(call(module, server))


def test_a_cancelled_request_ends_and_is_stopped_by_id_before_its_first_token(module: Any) -> None:
    def answer(request: Any) -> Any:
        return stream() if "stop" in request.json else [HANG]

    with ThreadPoolExecutor() as pool, serving(answer) as server:
        prepared = call(module, server)
        reader = pool.submit(list, prepared)
        arrived = server.request()
        prepared.cancel()
        assert reader.result(PATIENCE_S) == []
        assert arrived.left.wait(PATIENCE_S)
        assert server.request(1).json["stop"] is True
        assert {request.json["id"] for request in server.requests} == {"a-1"}


def test_leaving_it_after_a_token_closes_the_connection(module: Any) -> None:
    with serving([*stream(token(), end=False), HANG]) as server:
        with closing(iter(call(module, server))) as responses:
            assert next(responses).beams == [[7]]
        assert server.request().left.wait(PATIENCE_S)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ({}, "_HTTPCall"),
        ({"return_context_logits": np.array([[True]])}, "_BLSCall"),
        ({"lora_weights": np.zeros((1, 2, 3), dtype=np.float16)}, "_BLSCall"),
    ],
)
def test_only_what_json_does_not_carry_is_a_bls_call(
    module: Any, inputs: dict[str, Any], kind: str
) -> None:
    with serving(stream()) as server:
        assert type(call(module, server, **inputs)).__name__ == kind
