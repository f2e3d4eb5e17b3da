"""LoRA adapters on the mock engine, through the front, Cog and Triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from lora_adapters import adapter
from stack import Stack, text_of

pytestmark = [pytest.mark.integration, pytest.mark.full]
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("lora")
    adapter(directory / "two", 2)
    adapter(directory / "adapters" / "nine", 9)
    adapter(directory / "outside", 3)
    config = directory / "serve.yaml"
    config.write_text("lora_adapters: {two: two}")
    stack = Stack(
        directory / "work",
        None,
        COG_TRITON_ENGINE="mock",
        MOCK_TPS="0",
        COG_TRITON_CONFIG=str(config),
        COG_TRITON_API_KEY="secret",
        LORA_DIR=str(directory / "adapters"),
    )
    with stack.served():
        yield stack


def words(stack: Stack, model: str) -> str:
    body = {"model": model, "prompt": "Hi", "max_tokens": 24}
    answer = httpx.post(f"{stack.own}/v1/completions", json=body, headers=KEY, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["text"]
    return text


def change(stack: Stack, what: str, headers: dict[str, str] = KEY, **body: Any) -> httpx.Response:
    url = f"{stack.own}/v1/{what}_lora_adapter"
    return httpx.post(url, json=body, headers=headers, timeout=60)


def test_an_adapter_is_selected_by_name_in_both_apis(mock: Stack) -> None:
    base, two = words(mock, "mock"), words(mock, "two")
    assert base.startswith("The sea was calm")
    assert base != two
    assert two[:20] in base
    answer = httpx.post(
        f"{mock.url}/predictions",
        json={"input": {"prompt": "Hi", "max_tokens": 24, "lora_name": "two"}},
        headers=KEY,
        timeout=60,
    ).json()
    assert text_of(answer) == two
    answer = httpx.post(
        f"{mock.url}/predictions",
        json={"input": {"prompt": "Hi", "lora_name": "tow"}},
        headers=KEY,
        timeout=60,
    ).json()
    assert "lora_name='tow': no such adapter; did you mean 'two'?" in answer["error"]


def test_clients_of_triton_name_adapters_too(mock: Stack) -> None:
    values = {"input_ids": [5], "input_lengths": 1, "request_output_len": 8}
    url = f"{mock.triton}/v2/models/tensorrt_llm/generate"
    base = httpx.post(url, json=values, headers=KEY, timeout=60).json()["output_ids"]
    body = {**values, "lora_name": "two"}
    two = httpx.post(url, json=body, headers=KEY, timeout=60).json()["output_ids"]
    assert base[1:][2:] == two[1:][:-2]
    refused = httpx.post(url, json={**values, "lora_name": "x"}, headers=KEY, timeout=60)
    assert "lora_name='x': no such adapter" in refused.json()["error"]


def test_adapters_come_and_go_with_the_key(mock: Stack) -> None:
    assert change(mock, "load", {}, lora_name="nine", lora_path="nine").status_code == 401
    assert change(mock, "load", lora_name="out", lora_path="../outside").status_code == 400
    loaded = change(mock, "load", lora_name="nine", lora_path="nine")
    assert loaded.text == "Success: LoRA adapter 'nine' added successfully."
    assert words(mock, "nine") not in (words(mock, "mock"), words(mock, "two"))
    listed = httpx.get(f"{mock.own}/v1/models", headers=KEY, timeout=60).json()["data"]
    parents = {model["id"]: model.get("parent") for model in listed}
    assert parents == {"mock": None, "two": "mock", "nine": "mock"}
    metrics = httpx.get(f"{mock.own}/metrics", headers=KEY, timeout=60).text
    assert "vllm:lora_requests_info{" in metrics
    assert change(mock, "unload", lora_name="nine").status_code == 200
    body = {"model": "nine", "prompt": "Hi"}
    gone = httpx.post(f"{mock.own}/v1/completions", json=body, headers=KEY, timeout=60)
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "model")
