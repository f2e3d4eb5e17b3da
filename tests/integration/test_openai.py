"""OpenAI API over the real Cog, Triton and model."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from stack import Stack, predict, text_of, wait_until

pytestmark = pytest.mark.integration

FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
ASK = [{"role": "user", "content": FRANCE}]
FREED_S = 10


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    url = f"{stack.own}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (only,) = client.models.list().data
    return only.id


def test_chat_has_the_text_of_predictions(stack: Stack, client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, max_completion_tokens=32
    )
    (choice,) = answer.choices
    assert choice.message.content == PARIS
    assert choice.finish_reason == "stop"
    metrics = stack.predict(FRANCE, temperature=0, max_tokens=32)["metrics"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == metrics["input_token_count"]
    assert answer.usage.completion_tokens == metrics["output_token_count"]


def test_streamed_chat_has_usage(client: openai.OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=ASK,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == PARIS
    assert len([text for text in said if text]) > 2
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (37, 7)


def test_streams_of_the_async_client_run_concurrently(stack: Stack, model: str) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, str | None]:
        stream = await client.chat.completions.create(
            model=model,
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
        url = f"{stack.own}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(12)))

    results = asyncio.run(all_of_them())
    assert all(said and reason in ("stop", "length") for said, reason in results)


def test_completions_continue_a_text(client: openai.OpenAI, model: str) -> None:
    prompt = "The capital of France is"
    whole = client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=4, logprobs=0
    )
    (choice,) = whole.choices
    assert choice.text.startswith(" Paris")
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert all(value <= 0 for value in choice.logprobs.token_logprobs or [])
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 4)
    streamed = client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=4, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_log_probabilities_of_an_echoed_prompt(client: openai.OpenAI, model: str) -> None:
    """What an evaluation of likelihoods asks; the same whether the prompt is short or in chunks."""
    prompt = "The capital of France is Paris."
    texts = [prompt, "one two three four " * 300 + prompt]
    for text in texts:
        answer = client.completions.create(
            model=model, prompt=text, temperature=0, max_tokens=0, echo=True, logprobs=0
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (text, "length")
        assert choice.logprobs is not None
        first, *values = choice.logprobs.token_logprobs or []
        assert first is None
        assert all(-50 < value <= 0 for value in values if value is not None)
        assert "".join(choice.logprobs.tokens or []) == text
    both = client.completions.create(
        model=model, prompt=prompt[:-8], temperature=0, max_tokens=3, echo=True, logprobs=0
    )
    plain = client.completions.create(
        model=model, prompt=prompt[:-8], temperature=0, max_tokens=3, logprobs=0
    )
    found, expected = both.choices[0], plain.choices[0]
    assert found.text == prompt[:-8] + expected.text
    assert found.logprobs is not None
    assert expected.logprobs is not None
    made = (found.logprobs.token_logprobs or [])[-3:]
    assert made == pytest.approx(expected.logprobs.token_logprobs, abs=1e-3)


def test_several_answers_and_prompts(client: openai.OpenAI, model: str) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    answer = client.completions.create(
        model=model, prompt=prompts, n=2, temperature=0, max_tokens=1
    )
    assert [choice.text for choice in answer.choices] == [" Paris"] * 2 + [" Rome"] * 2
    sampled = client.chat.completions.create(
        model=model, messages=ASK, n=4, seed=7, temperature=2, max_tokens=8
    )
    assert len({choice.message.content for choice in sampled.choices}) > 1
    with pytest.raises(openai.BadRequestError, match="chosen token"):
        client.completions.create(model=model, prompt="a", logprobs=1)


def test_guided_answers_in_vllms_spelling(client: openai.OpenAI, model: str) -> None:
    def said(**fields: Any) -> str:
        answer = client.chat.completions.create(
            model=model, messages=ASK, temperature=0, max_tokens=16, extra_body=fields
        )
        return answer.choices[0].message.content or ""

    assert said(guided_choice=["Rome (I.)", 'Paris, "F"']) in ("Rome (I.)", 'Paris, "F"')
    assert re.fullmatch(r"[0-9]{3}-[a-c]{2}", said(guided_regex="[0-9]{3}-[a-c]{2}"))
    assert said(structured_outputs={"regex": "^(?:Berlin|Oslo)$"}) in ("Berlin", "Oslo")
    text = client.completions.create(
        model=model,
        prompt="A city:",
        max_tokens=16,
        temperature=0,
        extra_body={"response_format": {"type": "json_object"}},
    )
    assert text.choices[0].text.lstrip().startswith("{")
    with pytest.raises(openai.BadRequestError, match="guided_grammar: not supported"):
        said(guided_grammar='root ::= "a"')
    with pytest.raises(openai.BadRequestError, match="guided_regex: a '\\('"):
        said(guided_regex="(a")
    assert said() == PARIS


def test_min_p_of_1_is_greedy(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ASK, temperature=2, max_tokens=16, extra_body={"min_p": 1}
    )
    assert answer.choices[0].message.content == PARIS


def test_a_stream_is_server_sent_events_that_end_in_done(stack: Stack, model: str) -> None:
    body = {"model": model, "messages": ASK, "temperature": 0, "stream": True}
    answer = httpx.post(f"{stack.own}/v1/chat/completions", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == PARIS


@pytest.mark.parametrize("stop", ["nce is P", [" Paris", "zzz"]])
def test_stop_string_ends_the_text_before_it(client: openai.OpenAI, model: str, stop: Any) -> None:
    answer = client.chat.completions.create(model=model, messages=ASK, temperature=0, stop=stop)
    first = stop if isinstance(stop, str) else stop[0]
    assert answer.choices[0].message.content == PARIS[: PARIS.index(first)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_gives_the_same_text_through_both_apis(
    stack: Stack, client: openai.OpenAI, model: str
) -> None:
    def one(seed: int) -> str:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Invent a name."}],
            seed=seed,
            max_tokens=24,
        )
        return answer.choices[0].message.content or ""

    # A request in the same batch, such as a stopped one of another test, may change the text.
    wait_until(lambda: stack.engine_requests() == 0, FREED_S)
    texts = [one(seed) for seed in (0, 1, 2)]
    assert [one(seed) for seed in (0, 1, 2)] == texts
    assert len(set(texts)) > 1
    same = stack.predict("Invent a name.", seed=1, temperature=1, top_p=1, max_tokens=24)
    assert text_of(same) == texts[1]


class City(pydantic.BaseModel):
    name: str
    population: int
    capital_of: str | None


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_response_follows_its_json_schema(client: openai.OpenAI, model: str, seed: int) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe a city."}],
        response_format=City,
        seed=seed,
        max_tokens=200,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, City)


def test_json_object_response_is_an_object(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe Paris as JSON, in one line."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=300,
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("schema", [{"type": "foo"}, {"pattern": "("}, {"$ref": "#/nope"}])
def test_bad_schema_is_refused_even_by_triton_itself(
    stack: Stack, client: openai.OpenAI, model: str, schema: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="E1005"):
        client.chat.completions.create(
            model=model,
            messages=ASK,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "bad", "schema": schema},
            },
        )
    values = {
        "input_ids": [1, 2],
        "input_lengths": 2,
        "request_output_len": 4,
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": json.dumps(schema),
    }
    answer = httpx.post(f"{stack.triton}/v2/models/tensorrt_llm/generate", json=values)
    assert answer.status_code == 400
    assert "E1005 InvalidArgument: guided_decoding_guide" in answer.json()["error"]
    assert text_of(stack.predict(FRANCE, temperature=0))


@pytest.mark.parametrize("streamed", [True, False])
def test_disconnect_frees_the_engine(stack: Stack, model: str, streamed: bool) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a very long story."}],
        "stream": streamed,
        "max_tokens": 4000,
        "ignore_eos": True,
    }
    with httpx.Client(timeout=60) as http:
        if streamed:
            with http.stream("POST", f"{stack.own}/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                for _ in range(12):
                    next(lines)
                assert stack.engine_requests() == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(f"{stack.own}/v1/chat/completions", json=body, timeout=2)
    wait_until(lambda: stack.engine_requests() == 0, FREED_S)


def metrics_of(stack: Stack) -> dict[str, float]:
    """/metrics, by name and labels."""
    lines = httpx.get(f"{stack.own}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_metrics_count_the_requests(stack: Stack, client: openai.OpenAI, model: str) -> None:
    names = [
        "cog_triton_time_to_first_token_seconds_count",
        "cog_triton_inter_token_latency_seconds_count",
        "cog_triton_request_duration_seconds_count",
        "cog_triton_queue_time_seconds_count",
        "cog_triton_prompt_tokens_total",
        "cog_triton_generation_tokens_total",
        'cog_triton_requests_total{endpoint="chat",outcome="stop"}',
        'cog_triton_requests_total{endpoint="predictions",outcome="stop"}',
        'cog_triton_errors_total{code="E1001"}',
        'cog_triton_errors_total{code="E1002"}',
    ]

    before = metrics_of(stack)
    client.chat.completions.create(model=model, messages=ASK, temperature=0)
    stack.predict(FRANCE, temperature=0)
    stack.predict(" ")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="word " * 9000)
    after = metrics_of(stack)
    moved = [after[name] - before.get(name, 0) for name in names]
    assert moved == [2, 12, 2, 2, 74, 14, 1, 1, 1, 1]
    for name in (
        "requests_running",
        "requests_waiting",
        "engine_restarts_total",
        "steps_lost_total",
    ):
        assert after[f"cog_triton_{name}"] == 0
    assert after["cog_triton_step_lag"] >= 1
    assert after["cog_triton_ready"] == 1


def test_platforms_read_queue_and_kv_cache_under_names_of_vllm(stack: Stack, model: str) -> None:
    labels = f'engine="0",model_name="{model}"'
    usage = f"vllm:kv_cache_usage_perc{{{labels}}}"
    wait_until(lambda: metrics_of(stack)[usage] == 0)
    body = {"model": model, "prompt": "Once", "max_tokens": 4000, "stream": True}
    with httpx.stream(
        "POST", f"{stack.own}/v1/completions", json={**body, "ignore_eos": True}, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_until(lambda: metrics_of(stack)[usage] > 0)
        now = metrics_of(stack)
        assert now[f"vllm:num_requests_running{{{labels}}}"] == 1
        assert now[f"vllm:num_requests_waiting{{{labels}}}"] == 0
        assert 0 < now["cog_triton_kv_cache_usage_ratio"] < 1
        (config,) = (name for name in now if name.startswith("vllm:cache_config_info{"))
        assert re.search('block_size="32".*num_gpu_blocks="[1-9][0-9]*"', config)
    wait_until(lambda: metrics_of(stack)[usage] == 0)


def test_tritons_own_metrics_are_reachable(stack: Stack) -> None:
    answer = httpx.get(f"{stack.own}/metrics/triton")
    assert answer.status_code == 200, answer.text
    assert "nv_inference_request_success" in answer.text
    assert "nv_trt_llm_request_metrics" in answer.text


def test_request_log_has_a_line_for_each_request_and_no_prompt(
    stack: Stack, client: openai.OpenAI, model: str
) -> None:
    secret = "xyzzy-plugh-43"
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": secret}], max_tokens=3
    )
    prediction = stack.predict(secret, max_tokens=3)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt=secret, temperature=-1)
    for request_id in (answer.id, prediction["id"]):
        (line,) = re.findall(rf"^.* id={request_id} .*$", stack.output, re.MULTILINE)
        assert "outcome=length" in line
        assert "output_tokens=3" in line
        assert "ttft_s=0." in line
    assert "refused endpoint=completions code=E1005" in stack.output
    assert secret not in stack.output


def test_predictions_accept_messages(stack: Stack) -> None:
    chat = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": FRANCE}]},
    ]
    prediction = predict(stack.url, messages=chat, temperature=0, max_tokens=32)
    assert "Paris" in text_of(prediction)
    same = predict(stack.url, messages=ASK, temperature=0, max_tokens=32)
    assert text_of(same) == PARIS


def test_health_is_ready(stack: Stack) -> None:
    assert httpx.get(f"{stack.own}/health").json() == {"status": "ready"}
