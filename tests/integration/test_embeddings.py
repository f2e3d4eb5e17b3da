"""A model of embeddings through Triton: /v1/embeddings, vllm_model, and what is refused there."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from stack import Stack, predict, wait_until
from vllm_engines import MAX_MODEL_LEN, calls, double_environment, vllm_engine

pytestmark = [pytest.mark.integration, pytest.mark.full]

MODEL = "tiny-embedder"


class EmbeddingStack(Stack):
    """``cog-triton serve`` on a pooling model; vLLM is the double, whose embedding tells the
    prompt's length and first bytes."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.journal = directory / "journal"
        config = {"is_matryoshka": True, "hidden_size": 8}
        engine = vllm_engine(directory / "engine", config=config, runner="pooling")
        environment |= {"SERVED_MODEL_NAME": MODEL}
        super().__init__(
            directory / "work", str(engine), **double_environment(self.journal, **environment)
        )

    def post(self, path: str, **values: Any) -> httpx.Response:
        return httpx.post(f"{self.own}{path}", json={"model": MODEL, **values}, timeout=60)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingStack]:
    with EmbeddingStack(tmp_path_factory.mktemp("embeddings")).served() as started:
        yield started


def expected(text: str, size: int = 8) -> list[float]:
    made = np.zeros(size, np.float32)
    told = [len(text), *text.encode()][:size]
    made[: len(told)] = told
    return (made / np.linalg.norm(made)).tolist()  # type: ignore[no-any-return]


def test_embeddings_come_as_they_were_made(stack: EmbeddingStack) -> None:
    answer = stack.post("/v1/embeddings", input=["abc", "größer"[:2]]).json()
    found = [np.float32(item["embedding"]).tolist() for item in answer["data"]]
    assert found == [expected("abc"), expected("gr")]
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    (item,) = stack.post("/v1/embeddings", input=list(b"abc"), dimensions=2).json()["data"]
    assert np.float32(item["embedding"]).tolist() == expected("abc", 2)
    whole = stack.post("/v1/embeddings", input="a" * MAX_MODEL_LEN)
    assert whole.json()["usage"]["prompt_tokens"] == MAX_MODEL_LEN


def test_many_inputs_are_each_embedded(stack: EmbeddingStack) -> None:
    texts = [f"text {number}" for number in range(200)]
    data = stack.post("/v1/embeddings", input=texts).json()["data"]
    assert [np.float32(item["embedding"]).tolist() for item in data] == list(map(expected, texts))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"input": "a" * (MAX_MODEL_LEN + 1)}, "E1002"),
        ({"input": "a", "dimensions": 9}, "E1005 InvalidArgument: Model"),
        ({"input": ""}, "E1001"),
    ],
)
def test_refusals(stack: EmbeddingStack, values: dict[str, Any], words: str) -> None:
    answer = stack.post("/v1/embeddings", **values)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_text_is_refused_by_name_everywhere(stack: EmbeddingStack) -> None:
    ask = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, values in (("chat/completions", ask), ("completions", {"prompt": "Hi"})):
        assert "makes embeddings" in stack.post(f"/v1/{path}", **values).text
    prediction = predict(stack.url, prompt="Hi")
    assert prediction["status"] == "failed"
    assert prediction["error"].startswith("E1005 InvalidArgument: this model makes embeddings")
    (model,) = httpx.get(f"{stack.own}/v1/models").json()["data"]
    assert model["max_model_len"] == MAX_MODEL_LEN
    assert model["capabilities"]["embeddings"] is True
    values = {"text_input": "Hi", "max_tokens": 5, "bad_words": "", "stop_words": ""}
    answer = httpx.post(f"{stack.triton}/v2/models/ensemble/generate", json=values, timeout=60)
    assert "E1005" in answer.json()["error"]
    assert stack.health() == "READY"


def test_vllm_model_takes_the_request_of_vllm_backend(stack: EmbeddingStack) -> None:
    url = f"{stack.triton}/v2/models/vllm_model/generate"
    request = {"input": "abc", "pooling_params": {"dimensions": [4]}}
    values = {"text_input": "", "embedding_request": json.dumps(request)}
    answer = httpx.post(url, json={**values, "return_num_input_tokens": True}, timeout=60).json()
    assert json.loads(answer["text_output"]) == expected("abc", 4)
    assert answer["num_input_tokens"] == 3
    answer = httpx.post(url, json={"text_input": "abc"}, timeout=60).json()
    assert "vllm_model does not support 'generate' request" in answer["error"]


def test_a_client_that_leaves_stops_the_engine(tmp_path: Path) -> None:
    with EmbeddingStack(tmp_path, VLLM_DOUBLE_DELAY="3").served() as stack:
        seen = len(calls(stack.journal, "abort"))
        client = HTTPConnection("127.0.0.1", stack.openai, timeout=60)
        body = json.dumps({"model": MODEL, "input": "abc", "dimensions": 4})
        client.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        added = partial(calls, stack.journal, "add_request")
        wait_until(lambda: any(one["params"]["dimensions"] == 4 for one in added()))
        # A reset, as an end so soon after the request may be that of its sending alone.
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        wait_until(lambda: len(calls(stack.journal, "abort")) > seen)
