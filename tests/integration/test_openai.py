"""OpenAI API over the real Cog and Triton, with the mock for a model."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from engine_fixtures import ENDLESS, FRANCE, LONG, PARIS, MockText
from stack import Stack, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("mock")]

ASK: Any = [{"role": "user", "content": FRANCE}]
MODEL = "mock"


@pytest.fixture(scope="module")
def client(mock: Stack) -> Iterator[openai.OpenAI]:
    url = f"{mock.own}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_chat_streams_during_generation(mock: Stack, client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=ENDLESS, stream=True
    ) as chunks:
        said = (chunk.choices[0].delta.content for chunk in chunks)
        assert len([next(text for text in said if text) for _ in range(3)]) == 3
        wait_until(lambda: mock.engine_requests() == 1)
    wait_until(lambda: mock.engine_requests() == 0)


def test_streams_of_the_async_client_run_concurrently(mock: Stack, mock_text: MockText) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, str | None]:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Say the number {number}."}],
            max_tokens=24,
            stream=True,
        )
        said, reason = "", None
        async for chunk in stream:
            said += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        return said, reason

    async def all_of_them() -> list[tuple[str, str | None]]:
        url = f"{mock.own}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(12)))

    assert asyncio.run(all_of_them()) == [(mock_text(24), "length")] * 12


def metrics_of(stack: Stack) -> dict[str, float]:
    """/metrics, by name and labels."""
    lines = httpx.get(f"{stack.own}/metrics", timeout=60).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_metrics_count_the_requests(
    mock: Stack, client: openai.OpenAI, mock_text: MockText
) -> None:
    prompt, answer = mock_text.count_chat(("user", FRANCE)), mock_text.count(PARIS)
    expected = {
        "cog_triton_time_to_first_token_seconds_count": 2,
        "cog_triton_request_duration_seconds_count": 2,
        "cog_triton_queue_time_seconds_count": 2,
        "cog_triton_prompt_tokens_total": 2 * prompt,
        "cog_triton_generation_tokens_total": 2 * answer,
        'cog_triton_requests_total{endpoint="chat",outcome="stop"}': 1,
        'cog_triton_requests_total{endpoint="predictions",outcome="stop"}': 1,
        'cog_triton_errors_total{code="E1001"}': 1,
        'cog_triton_errors_total{code="E1002"}': 1,
    }
    latencies = "cog_triton_inter_token_latency_seconds_count"

    def moved() -> dict[str, float]:
        after = metrics_of(mock)
        return {name: after[name] - before.get(name, 0) for name in [*expected, latencies]}

    idle = ("cog_triton_requests_running", "cog_triton_requests_waiting")
    wait_until(lambda: not any(metrics_of(mock)[name] for name in idle))
    before = metrics_of(mock)
    client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    mock.predict(FRANCE, temperature=0)
    mock.predict(" ")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=LONG)
    wait_until(lambda: not any(metrics_of(mock)[name] for name in idle))
    counted = moved()
    # Of the tokens that come first there are no latencies: one, or more on a slow machine.
    assert 0 <= counted.pop(latencies) <= 2 * (answer - 1)
    assert counted == expected
    after = metrics_of(mock)
    assert after["cog_triton_engine_restarts_total"] == 0
    assert after["cog_triton_steps_lost_total"] == 0
    assert after["cog_triton_step_lag"] >= 1
    assert after["cog_triton_ready"] == 1


def test_platforms_read_queue_and_kv_cache_under_names_of_vllm(mock: Stack) -> None:
    labels = f'engine="0",model_name="{MODEL}"'
    usage = f"vllm:kv_cache_usage_perc{{{labels}}}"
    running = f"vllm:num_requests_running{{{labels}}}"
    wait_until(lambda: metrics_of(mock)[usage] == 0)
    body = {"model": MODEL, "prompt": "Once", "max_tokens": ENDLESS, "stream": True}
    with httpx.stream(
        "POST", f"{mock.own}/v1/completions", json={**body, "ignore_eos": True}, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_until(lambda: metrics_of(mock)[usage] > 0)
        wait_until(lambda: metrics_of(mock)[running] == 1)
        now = metrics_of(mock)
        assert now[f"vllm:num_requests_waiting{{{labels}}}"] == 0
        assert 0 < now["cog_triton_kv_cache_usage_ratio"] < 1
        (config,) = (name for name in now if name.startswith("vllm:cache_config_info{"))
        assert re.search('block_size="32".*num_gpu_blocks="[1-9][0-9]*"', config)
    wait_until(lambda: metrics_of(mock)[usage] == 0)


def test_tritons_own_metrics_are_reachable(mock: Stack) -> None:
    answer = httpx.get(f"{mock.own}/metrics/triton", timeout=60)
    assert answer.status_code == 200, answer.text
    assert "nv_inference_request_success" in answer.text
    assert "nv_trt_llm_request_metrics" in answer.text
