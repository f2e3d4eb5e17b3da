"""Private models of Triton: the front door says that there are none."""

from __future__ import annotations

import json

import pytest
from test_door_gates import status, triton

from cog_triton.door.triton_gate import published_models

PRIVATE = ("engine_steps", "lora_loader")


@pytest.mark.parametrize("model", PRIVATE)
@pytest.mark.parametrize("rest", ["", "/config", "/stats", "/ready", "/versions/1/stats"])
def test_private_models_are_unknown_to_readers(rest: str, model: str) -> None:
    assert status(triton(), "GET", f"/v2/models/{model}{rest}") == 404


@pytest.mark.parametrize("model", PRIVATE)
@pytest.mark.parametrize("rest", ["infer", "generate", "generate_stream", "versions/1/generate"])
def test_private_models_take_no_requests(rest: str, model: str) -> None:
    assert status(triton(), "POST", f"/v2/models/{model}/{rest}", b"{}") == 404
    assert status(triton(), "POST", f"/v2/models/{model}2/{rest}", b"{}") == 200


def test_private_models_are_in_no_list() -> None:
    names = (*PRIVATE, "tensorrt_llm")
    index = [{"name": name, "state": "READY"} for name in names]
    found = published_models(200, json.dumps(index).encode())
    assert found is not None
    assert json.loads(found.body) == index[-1:]
    stats = {"model_stats": [{"name": name, "inference_count": 1} for name in names]}
    found = published_models(200, json.dumps(stats).encode())
    assert found is not None
    assert json.loads(found.body) == {"model_stats": stats["model_stats"][-1:]}
    assert published_models(200, b"") is None
    for status_ in (404, 500):
        refused = published_models(status_, b'{"error": "no"}')
        assert refused is not None
        assert refused.status == status_
