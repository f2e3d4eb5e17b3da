"""What only a real model shows: both APIs and Triton's own over the demo engine."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pydantic
import pytest
from engine_fixtures import FRANCE, PARIS
from stack import Stack, predict, text_of, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("demo")]

ASK: Any = [{"role": "user", "content": FRANCE}]


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    url = f"{stack.own}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (only,) = client.models.list().data
    return only.id


def test_the_answer_is_right_through_both_apis(
    stack: Stack, client: openai.OpenAI, model: str
) -> None:
    prediction = stack.predict(FRANCE, temperature=0, max_tokens=32)
    assert text_of(prediction) == PARIS
    metrics = prediction["metrics"]
    assert (metrics["input_token_count"], metrics["output_token_count"]) == (37, 7)
    assert metrics["finish_reason"] == "stop"
    answer = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, max_completion_tokens=32
    )
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 7)


def test_runner_and_engine_refuse_bad_input(stack: Stack) -> None:
    """Where the mock differs: it has a prompt of its own, and takes any penalty."""
    assert "E1001 " in predict(stack.url)["error"]
    assert "E1005 " in stack.predict("Hi.", frequency_penalty=1e30)["error"]
    error = stack.predict("Hi.", presence_penalty=3)["error"]
    for words in ("E1005 ", "presence_penalty=3", "from -2 to 2"):
        assert words in error
    wait_until(lambda: stack.engine_requests() == 0)


def test_disconnect_during_prefill_frees_the_slot(stack: Stack) -> None:
    prompt = "This is a long prompt. " * 1200
    with stack.stream(prompt, max_tokens=1000):
        wait_until(lambda: stack.engine_requests() == 1)
    wait_until(lambda: stack.engine_requests() == 0)


def metrics_of(stack: Stack) -> dict[str, float]:
    """/metrics, by name and labels."""
    lines = httpx.get(f"{stack.own}/metrics", timeout=60).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_a_disconnect_amid_the_output_frees_slot_and_kv_cache(stack: Stack) -> None:
    """All tokens would take minutes."""
    wait_until(lambda: stack.engine_requests() == 0)
    with stack.stream("Tell me a story.", max_tokens=8000, min_tokens=8000) as events:
        outputs = (kind for kind, _ in events if kind == "output")
        for _ in range(5):
            next(outputs)
        wait_until(lambda: stack.engine_requests() == 1)
        wait_until(lambda: metrics_of(stack)["cog_triton_kv_cache_usage_ratio"] > 0)
    wait_until(lambda: stack.engine_requests() == 0, 60)
    wait_until(lambda: metrics_of(stack)["cog_triton_kv_cache_usage_ratio"] == 0)


def test_seed_gives_the_same_text_alone_and_in_a_batch(stack: Stack) -> None:
    def one(seed: int) -> str:
        # OpenVINO draws from tokens in order of probability; the order of rare ones is no two
        # batches' on a CPU whose sums differ in the last bits.
        sampling = {"temperature": 1, "top_k": 5, "max_tokens": 24}
        return text_of(stack.predict("Invent a name.", seed=seed, **sampling))

    alone = [one(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, [0, 1, 2, 3, 0, 1, 2, 3]))
    same = [text == other for text, other in zip(alone, together, strict=False)]
    assert sum(same) >= 3, (alone, together)
    assert together[:4] == together[4:]
    assert len(set(together)) > 1


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
    wait_until(lambda: stack.engine_requests() == 0)
    texts = [one(seed) for seed in (0, 1, 2)]
    assert [one(seed) for seed in (0, 1, 2)] == texts
    assert len(set(texts)) > 1
    same = stack.predict("Invent a name.", seed=1, temperature=1, top_p=1, max_tokens=24)
    assert text_of(same) == texts[1]


def test_log_has_the_lines_of_the_original_and_no_prompt(stack: Stack) -> None:
    secret = "xyzzy-plugh-42"
    logs = stack.predict(secret, max_tokens=4, log_performance_metrics=True)["logs"]
    for line in (
        "Tokens processed: ",
        "Serverside tokens per second: ",
        "Serverside execution time: ",
        "Serverside time to first token: ",
        "Random seed used: ",
    ):
        assert line in logs
    assert secret not in logs
    for log in stack.work_dir.rglob("*.log"):
        assert secret not in log.read_text()


def test_tensor_contract_without_streaming(stack: Stack) -> None:
    values = {
        "input_ids": [28120, 314],
        "input_lengths": 2,
        "request_output_len": 3,
        "end_id": -1,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_log_probs": True,
    }

    def generate(**extra: Any) -> Any:
        url = f"{stack.triton}/v2/models/tensorrt_llm/generate"
        return httpx.post(url, json={**values, **extra}, timeout=300).json()

    answer = generate()
    assert answer["output_ids"][:2] == [28120, 314]
    assert len(answer["output_ids"]) == answer["sequence_length"] == 5
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (2, 3)
    assert len(answer["output_log_probs"]) == 3
    assert answer["cum_log_probs"] == pytest.approx(sum(answer["output_log_probs"]), abs=1e-4)
    bare = generate(exclude_input_in_output=True)
    assert bare["output_ids"] == answer["output_ids"][2:]
    word = answer["output_ids"][3:5]
    stopped = generate(exclude_input_in_output=True, stop_words_list=[*word, 2, -1])
    assert stopped["output_ids"] == answer["output_ids"][2]


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


class City(pydantic.BaseModel):
    name: str
    population: int
    capital_of: str | None


def test_responses_follow_their_json_schema(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe a city."}],
        response_format=City,
        n=3,
        seed=1,
        max_tokens=200,
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, City)


HEXADECIMAL = "0123456789abcdefABCDEF"


@pytest.mark.full
def test_guides_write_latin_1_before_hexadecimal_digits(client: openai.OpenAI, model: str) -> None:
    """Each pair of a letter and a digit as key, const, enum, name of a tool, and in classes."""
    texts = ["".join(letter + digit for digit in HEXADECIMAL) for letter in "éßÿā"]
    values: dict[str, Any] = {text: {"const": text} for text in texts[::2]}
    values |= {text: {"enum": [text]} for text in texts[1::2]}
    values["größe in cm"] = {"const": "1/é1\x7f1"}

    def asked(**fields: Any) -> Any:
        values = {"model": model, "messages": ASK, "max_tokens": 1500, **fields}
        # The model is small: it would write spaces without end between keys.
        answer = client.chat.completions.create(temperature=0, frequency_penalty=2, **values)
        assert answer.choices[0].finish_reason in ("stop", "tool_calls")
        return answer.choices[0].message

    schema = {"type": "object", "properties": values, "required": [*values]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    expected = {text: text for text in texts} | {"größe in cm": "1/é1\x7f1"}
    assert json.loads(asked(response_format=form).content) == expected
    names = ["$top", "filter[é1]", "StartTime<", "a/b"]
    odd = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}}
    odd |= {"required": names, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": texts[2], "parameters": odd}}
    (call,) = asked(
        tools=[tool], tool_choice={"type": "function", "function": {"name": texts[2]}}
    ).tool_calls
    assert (call.function.name, [*json.loads(call.function.arguments)]) == (texts[2], names)
    (call,) = asked(tools=[tool], tool_choice="required", parallel_tool_calls=False).tool_calls
    assert (call.function.name, [*json.loads(call.function.arguments)]) == (texts[2], names)
    for regex in (r"[é\d]{2}\xe9d", "x[é0-]y", "[a-cà-ÿ0-9]{4}"):
        assert re.fullmatch(regex, asked(extra_body={"guided_regex": regex}).content)


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
    url = f"{stack.triton}/v2/models/tensorrt_llm/generate"
    answer = httpx.post(url, json=values, timeout=60)
    assert answer.status_code == 400
    assert "E1005 InvalidArgument: guided_decoding_guide" in answer.json()["error"]
    assert text_of(stack.predict(FRANCE, temperature=0)) == PARIS
