"""An LLM API engine behind the real Triton, Cog and front door; the engine is the double."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from llmapi_engines import calls, double_environment, llmapi_engine
from stack import Stack, predict, text_of, wait_until

pytestmark = pytest.mark.integration


class LLMAPIStack(Stack):
    """``cog-triton serve`` on a directory with llmapi.yaml."""

    def __init__(self, directory: Path) -> None:
        self.journal = directory / "journal"
        engine = llmapi_engine(directory / "engine", max_batch_size=8)
        environment = double_environment(self.journal)
        super().__init__(directory / "work", str(engine), **environment)


@pytest.fixture(scope="module")
def llmapi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMAPIStack]:
    stack = LLMAPIStack(tmp_path_factory.mktemp("llmapi"))
    with stack.served():
        yield stack


def complete(stack: Stack, **values: Any) -> httpx.Response:
    body = {"model": "engine", "prompt": "Hello there", "max_tokens": 32, **values}
    return httpx.post(f"http://127.0.0.1:{stack.openai}/v1/completions", json=body, timeout=60)


def test_predictions_have_the_text(llmapi: LLMAPIStack) -> None:
    prediction = predict(f"http://127.0.0.1:{llmapi.port}", prompt="Hello there", seed=7)
    assert text_of(prediction) == "Hello there"
    assert calls(llmapi.journal, "generate_async")[-1]["streaming"] is True


def test_completions_stop_where_they_are_told(llmapi: LLMAPIStack) -> None:
    models = httpx.get(f"http://127.0.0.1:{llmapi.openai}/v1/models", timeout=60).json()
    name = models["data"][0]["id"]
    answer = complete(llmapi, model=name, stop=[" th"], seed=3, temperature=0.5)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "stop")
    assert calls(llmapi.journal, "generate_async")[-1]["params"]["seed"] == 3


def test_tritons_own_api_streams(llmapi: LLMAPIStack) -> None:
    url = f"{llmapi.triton}/v2/models/ensemble/generate"
    body = {"text_input": "Hello there", "max_tokens": 5, "stream": False}
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text_output"].endswith("Hello")


def test_a_client_that_leaves_stops_the_generation(llmapi: LLMAPIStack) -> None:
    before = len(calls(llmapi.journal, "abort"))
    body = {"text_input": "slow " * 12, "max_tokens": 60, "stream": True}
    url = f"{llmapi.triton}/v2/models/ensemble/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        next(line for line in response.iter_lines() if line.startswith("data:"))
    wait_until(lambda: len(calls(llmapi.journal, "abort")) > before)


def test_refusals_have_codes(llmapi: LLMAPIStack) -> None:
    prediction = predict(f"http://127.0.0.1:{llmapi.port}", prompt="a" * 300)
    assert "E1002" in prediction["error"]
    prediction = predict(f"http://127.0.0.1:{llmapi.port}", prompt="boom")
    assert "E2100" in prediction["error"]


def test_metrics_count_requests(llmapi: LLMAPIStack) -> None:
    text = httpx.get(f"http://127.0.0.1:{llmapi.metrics}/metrics", timeout=60).text
    assert 'nv_inference_request_success{model="tensorrt_llm"' in text
    assert 'nv_trt_llm_request_metrics{model="tensorrt_llm"' in text
