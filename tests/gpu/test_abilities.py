"""What a request may ask: texts, seeds, guides, tools, log probabilities, adapters, and more."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gpu_models
import pytest
from gpu_servers import Card, Server
from stack import text_of, wait_until
from tokenizers import Tokenizer

from cog_triton.bench import load_generator
from cog_triton.bench.options import Lengths, Options, TargetName, Unit
from cog_triton.engines.request import EngineRequest
from cog_triton.text.sampling import SamplingParams

pytestmark = pytest.mark.gpu

QUESTION = "What is the capital of France?"
TALE = "The king of a small country in the mountains had three daughters, and"
NEVER_READ = 3500
"""Tokens of an answer that no test waits for."""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
WEATHER = "What will the weather be in Paris for two days?"


def request(text: Server, max_tokens: int, **values: Any) -> EngineRequest:
    """A greedy request of `TALE` in token ids, that no end of sequence cuts short."""
    sampling = SamplingParams(max_tokens=max_tokens, top_k=1)
    ids = text.post("tokenize", prompt=TALE, add_special_tokens=False)["tokens"]
    return EngineRequest(**{"end_id": -1, **values}, input_ids=ids, sampling=sampling)


@pytest.fixture(scope="module")
def ids(text: Server) -> list[int]:
    """The 48 greedy tokens after `TALE`."""
    return text.triton_ids(request(text, 48))


@pytest.fixture(scope="module")
def tale(ids: list[int], smollm2: Path) -> str:
    """Their text."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return str(tokenizer.decode(ids))


def fits_the_tool(call: dict[str, Any]) -> bool:
    given = json.loads(call["arguments"])
    assert call["name"] == "get_weather"
    assert set(given) == {"city", "days"}
    return given["city"] in ("Paris", "Rome") and type(given["days"]) is int


def test_real_weights_know_a_capital_through_both_apis(real: Card, text: Server) -> None:
    predicted = text_of(text.predict(QUESTION, max_tokens=32, temperature=0))
    assert "Paris" in predicted
    assert text.chat(QUESTION, max_tokens=32)["content"] == predicted


def test_every_api_gives_the_same_greedy_tokens(text: Server, ids: list[int], tale: str) -> None:
    assert len(ids) == 48
    values = {"prompt_template": "{prompt}", "max_tokens": 48, "min_tokens": 48, "temperature": 0}
    prediction = text.predict(TALE, **values)
    assert text_of(prediction) == tale
    assert prediction["metrics"]["output_token_count"] == 48
    assert text.complete(TALE, 48, ignore_eos=True) == tale
    asked = {"stream": False, "temperature": 0, "max_tokens": 48, "ignore_eos": True}
    answer = text.triton_text(text_input=TALE, parameters=asked)
    assert answer["text_output"].removeprefix(TALE) == tale
    assert text.triton_ids(request(text, 48, streaming=False)) == ids


def test_a_stream_has_many_events(text: Server) -> None:
    values = {"prompt_template": "{prompt}", "max_tokens": 64, "min_tokens": 64}
    with text.stream(TALE, **values) as events:
        kinds = [event for event, _ in events]
    assert kinds.count("output") >= 8
    assert kinds[-1] == "completed"


def test_an_answer_ends_where_it_is_asked_to(text: Server, ids: list[int], tale: str) -> None:
    stop = re.findall(r"\w{3,}", tale[len(tale) // 2 :])[0]
    values = {"prompt_template": "{prompt}", "max_tokens": 48, "temperature": 0}
    cut = text.predict(TALE, stop_sequences=stop, min_tokens=0, **values)
    assert text_of(cut) == tale[: tale.index(stop)]
    word = tuple(ids[10:12])
    place = next(n for n in range(len(ids)) if tuple(ids[n : n + 2]) == word)
    assert text.triton_ids(request(text, 48, stop_words=(word,))) == ids[:place]
    assert text.triton_ids(request(text, 48, end_id=ids[5])) == ids[: ids.index(ids[5])]


def test_bad_words_are_not_generated(real: Card, text: Server, ids: list[int]) -> None:
    assert ids[0] not in text.triton_ids(request(text, 48, bad_words=((ids[0],),)))


def test_a_seed_repeats_its_text_alone_and_in_a_batch(text: Server) -> None:
    def said(number: int) -> str:
        values = {"temperature": 1.0, "seed": number, "ignore_eos": True}
        return text.complete(f"{TALE} number {number}", 32, **values)

    numbers = range(16)
    alone = [said(number) for number in numbers]
    assert [said(number) for number in numbers] == alone
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(said, numbers))
    same = sum(one == other for one, other in zip(alone, together, strict=True))
    # In another batch two tokens of nearly the same probability may change places.
    assert same >= 12, f"{same} of 16 are the same in a batch"


def test_other_seeds_and_none_give_other_texts(real: Card, text: Server) -> None:
    values = {"temperature": 1.0, "ignore_eos": True}
    texts = [
        text.complete(TALE, 48, **values, **more) for more in ({"seed": 1}, {"seed": 2}, {}, {})
    ]
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    ("path", "values", "code"),
    [
        ("completions", {"prompt": " and" * 9000}, "E1002"),
        ("completions", {"prompt": "a", "temperature": 3}, "E1005"),
        ("completions", {"prompt": "a", "model": "three"}, "E1009"),
    ],
)
def test_the_openai_api_refuses_with_a_code(
    text: Server, path: str, values: dict[str, Any], code: str
) -> None:
    answer = text.ask(path, **values)
    assert answer["error"]["message"].startswith(code), answer


def test_every_api_passes_on_what_vllm_refuses(text: Server) -> None:
    told = text.predict(" and" * 9000, prompt_template="{prompt}")
    assert "E1002" in str(told["error"])
    told = text.triton_text(text_input="a", parameters={"temperature": 9.5})
    assert "E1005" in str(told["error"])
    hot = SamplingParams(max_tokens=4, temperature=9.0, top_p=0.5)
    events = text.triton_events(EngineRequest(input_ids=[5, 6], sampling=hot))
    assert "E1005" in str(events)


def test_further_outputs_of_vllm_backend(text: Server) -> None:
    asked = {"return_finish_reason": True, "return_num_output_tokens": True}
    asked |= {"return_logprobs": True, "return_cumulative_logprob": True}
    sampling = {"max_tokens": 5, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    told = text.triton_text(
        text_input=TALE,
        exclude_input_in_output=True,
        sampling_parameters=json.dumps(sampling),
        **asked,
    )
    assert (told["num_output_tokens"], told["finish_reason"]) == (5, "length")
    assert len(json.loads(told["logprobs"])) == 5


@pytest.mark.parametrize(
    ("guide", "value", "form"),
    [
        ("regex", "[0-9]{3}-[0-9]{4}", r"[0-9]{3}-[0-9]{4}"),
        ("choice", ["red", "green"], "red|green"),
        ("grammar", 'root ::= "yes" | "no"', "yes|no"),
    ],
)
def test_a_guide_is_obeyed(real: Card, text: Server, guide: str, value: Any, form: str) -> None:
    said = text.complete("It is ", 24, structured_outputs={guide: value})
    assert re.fullmatch(form, said), said


def test_a_json_schema_is_obeyed(real: Card, text: Server) -> None:
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    said = text.chat(WEATHER, response_format=form, max_tokens=64)["content"]
    assert fits_the_tool({"name": "get_weather", "arguments": said}), said


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "get_weather"}}, "required"]
)
def test_a_forced_tool_call_fits_its_schema(real: Card, text: Server, choice: Any) -> None:
    message = text.chat(WEATHER, tools=[TOOL], tool_choice=choice, max_tokens=120)
    assert message["tool_calls"]
    assert all(fits_the_tool(call["function"]) for call in message["tool_calls"]), message


def test_pieces_of_a_streamed_tool_call_are_its_arguments(real: Card, text: Server) -> None:
    messages = [{"role": "user", "content": WEATHER}]
    body = {"messages": messages, "tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
    calls = [
        call
        for piece in text.ask_events("chat/completions", **body)
        for choice in piece.get("choices", ())
        for call in choice["delta"].get("tool_calls") or ()
        if call["index"] == 0
    ]
    assert len(calls) >= 2
    names = [call["function"]["name"] for call in calls if call["function"].get("name")]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert fits_the_tool({"name": names[0], "arguments": arguments}), calls


def test_n_gives_as_many_answers_that_a_seed_repeats(text: Server) -> None:
    asked = {"prompt": TALE, "max_tokens": 16, "ignore_eos": True, "n": 4, "temperature": 1.0}
    one, two = (text.ask("completions", seed=5, **asked) for _ in range(2))
    assert [choice["index"] for choice in one["choices"]] == [0, 1, 2, 3]
    texts = [[choice["text"] for choice in each["choices"]] for each in (one, two)]
    assert texts[0] == texts[1]
    assert one["usage"]["completion_tokens"] == 64
    best = text.ask("completions", **{**asked, "n": 1, "best_of": 3})
    assert len(best["choices"]) == 1


def test_top_logprobs_are_in_order_and_the_chosen_one_is_first(text: Server) -> None:
    choice = text.choice(
        "chat/completions",
        messages=[{"role": "user", "content": QUESTION}],
        logprobs=True,
        top_logprobs=5,
        max_tokens=12,
    )
    rows = choice["logprobs"]["content"]
    assert rows
    for row in rows:
        values = [top["logprob"] for top in row["top_logprobs"]]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert row["top_logprobs"][0]["token"] == row["token"]
        assert row["logprob"] <= 0


def test_echo_has_log_probabilities_of_the_prompt(text: Server) -> None:
    choice = text.choice("completions", prompt=TALE, echo=True, logprobs=1, max_tokens=4)
    values = choice["logprobs"]["token_logprobs"]
    count = len(text.post("tokenize", prompt=TALE)["tokens"])
    assert len(values) == count + 4
    assert values[0] is None
    assert all(value <= 0 for value in values[1:]), values
    assert choice["text"].strip().startswith(TALE[:20])


def test_logit_bias_forces_and_bans_tokens(real: Card, text: Server) -> None:
    moon = text.post("tokenize", prompt=" moon", add_special_tokens=False)["tokens"][-1]
    assert text.complete(TALE, 4, logit_bias={str(moon): 100}).count("moon") == 4
    greedy = text.complete(TALE, 4)
    banned = text.post("tokenize", prompt=greedy, add_special_tokens=False)["tokens"]
    assert text.complete(TALE, 4, logit_bias={str(id_): -100 for id_ in banned}) != greedy


def test_tokens_become_their_text_again(text: Server) -> None:
    ids = text.post("tokenize", prompt=TALE)["tokens"]
    assert text.post("detokenize", tokens=ids)["prompt"] == TALE


def test_responses_answer(real: Card, text: Server) -> None:
    told = text.ask("responses", input=QUESTION, max_output_tokens=24)
    assert "Paris" in json.dumps(told["output"])


def test_each_adapter_has_its_own_text_alone_and_among_others(text: Server, card: Card) -> None:
    def said(name: str) -> str:
        return text.complete(TALE, model=name)

    names = ("model", *gpu_models.ADAPTERS)
    alone = {name: said(name) for name in names}
    if not card.rehearsal:
        assert len(set(alone.values())) == 3, alone
    predicted = text.predict(TALE, prompt_template="{prompt}", max_tokens=16, temperature=0,
                             lora_name="one")  # fmt: skip
    assert text_of(predicted) == alone["one"]
    with ThreadPoolExecutor(24) as threads:
        found = list(threads.map(said, names * 8))
    same = sum(one == alone[name] for one, name in zip(found, names * 8, strict=True))
    assert same >= 20, f"{same} of 24 are the same in a batch"


TARGETS = {
    TargetName.COG: lambda server: server.url,
    TargetName.OPENAI: lambda server: server.own,
    TargetName.TRITON: lambda server: server.triton,
}


@pytest.mark.parametrize("target", TARGETS)
def test_256_at_once_get_all_of_their_tokens(text: Server, target: TargetName) -> None:
    options = Options(
        url=TARGETS[target](text),
        target=target,
        unit=Unit.CONCURRENCY,
        rate=256,
        requests=512,
        input_lengths=Lengths.parse("", "64"),
        output_lengths=Lengths.parse("", "64"),
        model="model" if target is TargetName.OPENAI else None,
    )
    run = asyncio.run(load_generator.measure(options, print))
    wrong = [record for record in run.records if record.status != "ok"]
    assert wrong == []
    short = [record for record in run.records if (record.output_tokens or 0) < 64]
    assert len(run.records) == 512
    assert short == []


def test_clients_that_leave_free_the_engine(text: Server) -> None:
    running, cache = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"

    def settled() -> bool:
        return text.metric_values()[running] == 0

    wait_until(settled)
    values = {"prompt_template": "{prompt}", "max_tokens": NEVER_READ, "min_tokens": NEVER_READ}
    with ExitStack() as stack:
        streams: list[Iterator[tuple[str, Any]]] = [
            stack.enter_context(text.stream(f"{TALE} {number}", **values)) for number in range(8)
        ]
        for events in streams:
            next(data for event, data in events if event == "output")
        wait_until(lambda: text.metric_values()[running] == 8, 30)
        used = text.metric_values()[cache]
    assert used > 0
    wait_until(lambda: settled() and text.metric_values()[cache] < used / 2, 30)


def test_metrics_have_the_names_of_vllm(text: Server) -> None:
    names = {"num_requests_waiting", "prefix_cache_queries_total", "prefix_cache_hits_total"}
    assert {f"vllm:{name}" for name in names} - text.metric_values().keys() == set()
