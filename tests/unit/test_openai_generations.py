"""Chats and completions of the OpenAI API: what reaches the engine, and what clients get.

`make corpus` compares whole answers and refusals of a real server; here the engine does what the
mock does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
from engine_transport import EngineTransport
from openai_server import THREE, TOKENIZER, USER, Served, api, tokens, wait
from scripted_server import HANG, PATIENCE_S, RESET, Part
from scripted_triton import Request, event

from cog_triton.engines.base import Abilities
from cog_triton.engines.mock.engine import MockEngine
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.mock.mock_directory import make_engine, read_model
from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.engines.openvino import guides
from cog_triton.errors import TritonUnknownError
from cog_triton.serving.openai import sequences, streaming
from cog_triton.serving.openai.schema import openapi
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import ABILITIES
from cog_triton.text.tokenizer import EngineTokenizer

CHAT = {"messages": USER}
TEXT = {"prompt": "the"}
PATHS = [("chat/completions", CHAT), ("completions", TEXT)]
NAMES = ["zero", "one", "two", "three", "four", "five"]


def check(guide: Guide, where: str) -> None:
    """As OpenVINO, but for grammars."""
    (guide.check if guide.kind == "grammar" else partial(guides.check, guide))(where)


ALL = Abilities(
    guides={"json_schema", "regex", "grammar"}, sampling=frozenset(ABILITIES), check_guide=check
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with api(THREE, abilities=ALL, slots=8) as running:
        yield running


@pytest.fixture
def served(server: Served) -> Served:
    """A server whose engine answers with THREE, and can all that an engine can."""
    server.triton.answer_with(THREE)
    server.ended.clear()
    return server


def test_a_chat_is_rendered_generated_and_counted(served: Served) -> None:
    answer = served.ask("chat/completions", **CHAT, temperature=0, max_tokens=90, seed=5)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "the quick größer"
    assert served.prompt == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    sent = served.sent
    assert (sent["temperature"], sent["request_output_len"], sent["seed"]) == (0, 90, 5)
    prompt = len(sent["input_ids"])
    made = sum(len(TOKENIZER.encode(text)) for text in ("the ", "quick ", "größer"))
    assert (
        answer["usage"].items()
        >= {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }.items()
    )


def test_fields_beside_openais_reach_the_engine(served: Served) -> None:
    extra = {"ignore_eos": True, "top_k": 7, "repetition_penalty": 1.5, "min_tokens": 2}
    served.ask("chat/completions", **CHAT, **extra)
    names = {"end_id": -1, "runtime_top_k": 7, "repetition_penalty": 1.5, "min_tokens": 2}
    assert {name: served.sent[name] for name in names} == names


def test_default_stops_and_system_prompt_apply_unless_given() -> None:
    with api(THREE, stop_sequences="quick", system_prompt="Rhyme.") as served:
        texts = [
            served.ask("chat/completions", **CHAT, **fields)["choices"][0]["message"]["content"]
            for fields in ({}, {"stop": "r"})
        ]
        assert "Rhyme." in served.prompt
    assert texts == ["the ", "the quick g"]


def test_headers_are_sent_while_a_request_is_queued(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_HEADERS_AFTER_S", 0.01)
    served.triton.answer_with([HANG])
    body = {"model": "small", "stream": True, **CHAT}
    url = f"{served.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        assert "assistant" in next(answer.iter_lines())


FAILURES = [
    ("E2101 TritonTimeout: slow", 504, "server_error"),
    ("E2105 TritonUnavailable: gone", 503, "server_error"),
    ("E2107 Overloaded: full", 429, "rate_limit_error"),
    ("E2108 FatalRequest: the engine died of it", 422, "invalid_request_error"),
    ("something else", 500, "server_error"),
    ("E1005 InvalidArgument: top_p=7: no", 400, "invalid_request_error"),
    ("E1002 PromptTooLong: too long", 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("text", "status", "kind"), FAILURES)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_before_the_first_token_sets_the_status(
    served: Served, text: str, status: int, kind: str, streamed: bool
) -> None:
    served.triton.answer_with([event(error=text)])
    body = {"model": "small", "stream": streamed, **CHAT}
    answer = served.post("/v1/chat/completions", body)
    error = answer.json()["error"]
    code = text[:5] if text.startswith("E") else "E2100"
    assert (answer.status_code, error["type"]) == (status, kind)
    assert answer.headers["x-error-code"] == code
    openais = {"E2107": "rate_limit_exceeded", "E1002": "context_length_exceeded"}
    assert error["code"] == openais.get(code, code)
    assert error["message"].startswith(code)
    assert ("retry-after" in answer.headers) is (status in (429, 503))
    assert f'cog_triton_errors_total{{code="{code}"}}' in served.metrics.text().decode()


@pytest.mark.parametrize(
    ("end", "code"),
    [(event(error="E2107 Overloaded: full"), "rate_limit_exceeded"), (RESET, "E2105")],
)
def test_an_error_after_tokens_is_the_last_event(served: Served, end: Part, code: str) -> None:
    served.triton.answer_with([*tokens("the "), end])
    body = {"model": "small", "stream": True, **CHAT}
    text = served.post("/v1/chat/completions", body).text
    assert json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == code
    with pytest.raises(openai.APIError) as caught:
        list(served.client().chat.completions.create(**body))
    assert caught.value.code == code


def test_log_probabilities_that_the_engine_leaves_out_are_an_error(served: Served) -> None:
    answer = served.post("/v1/chat/completions", {"model": "small", "logprobs": True, **CHAT})
    assert (answer.status_code, answer.headers["x-error-code"]) == (500, "E2104")


def test_a_prompt_that_is_no_unicode_text_is_refused(served: Served) -> None:
    headers = {"Content-Type": "application/json"}
    answer = served.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=headers)
    assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("messages", USER, True),
        ("messages", [], False),
        ("messages", [{"role": "nobody"}], False),
        ("min_p", 0.5, True),
        ("min_p", 2, False),
    ],
)
def test_the_openapi_schema_accepts_what_the_server_does(
    field: str, value: Any, fits: bool
) -> None:
    schema = {**openapi(), "$ref": "#/components/schemas/ChatRequest"}
    body = {"model": "m", "messages": USER, field: value}
    assert jsonschema_rs.Draft202012Validator(schema).is_valid(body) is fits


# Several sequences of a request: n, best_of and lists of prompts.


def by_seed(request: Request) -> Iterable[Part]:
    """An answer with the name of the request's seed."""
    return tokens("number ", NAMES[request.values["seed"] % 10])


def test_sequences_have_seeds_of_their_own_in_order(served: Served) -> None:
    served.triton.answer_with(by_seed)
    answer = served.ask("completions", prompt=["a", "bb"], n=2, seed=1, max_tokens=90)
    assert [choice["text"] for choice in answer["choices"]] == ["number one", "number two"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [TOKENIZER.encode("a"), TOKENIZER.encode("bb")]
    sent = [request.values["input_ids"] for request in served.triton.requests[-4:]]
    assert sorted(sent, key=len) == [prompts[0]] * 2 + [prompts[1]] * 2
    made = sum(len(TOKENIZER.encode(text)) for text in ("number ", "one", "number ", "two"))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 2 * made
    served.triton.answer_with(THREE)
    served.ask("completions", prompt=["a", "b"], n=3)
    seeds = {request.values["seed"] for request in served.triton.requests[-6:]}
    assert len(seeds) == 6


def test_best_of_answers_with_the_likeliest(served: Served) -> None:
    def answer(request: Request) -> Iterable[Part]:
        assert request.values["return_log_probs"]
        seed = request.values["seed"]
        ids = TOKENIZER.encode(NAMES[seed])
        total = [-3.0, -1.0, -2.0, -9.0][seed] * len(ids)
        return [event(output_ids=ids, output_log_probs=[total / len(ids)] * len(ids))]

    served.triton.answer_with(answer)
    made = served.ask("completions", prompt="a", n=2, best_of=4, seed=0)
    assert [choice["text"] for choice in made["choices"]] == ["one", "two"]
    assert [choice["logprobs"] for choice in made["choices"]] == [None, None]
    assert made["usage"]["completion_tokens"] == sum(len(TOKENIZER.encode(x)) for x in NAMES[:4])
    refused = served.refusal("completions", prompt="a", n=2, best_of=4, stream=True)
    assert refused["param"] == "best_of"


def test_each_sequence_takes_a_place_until_it_ends() -> None:
    def answer(request: Request) -> Iterable[Part]:
        return [*tokens("a"), *([HANG] if request.values.get("seed") else [])]

    with api(answer, slots=3, queue=0) as served:
        assert served.refusal("completions", prompt="a", n=4)["param"] == "n"
        with served.client().completions.create(
            model="small", prompt="a", n=3, seed=0, stream=True
        ) as running:
            ended = [chunk.choices[0] for chunk in (next(running) for _ in range(4))]
            assert [choice.finish_reason for choice in ended if choice.index == 0] == [None, "stop"]
            assert served.admission.running == 2
            refused = served.post("/v1/completions", {"model": "small", "prompt": "a", "n": 2})
            assert refused.status_code == 429
        assert wait(lambda: served.admission.running == 0)
        left = [request.left for request in served.triton.requests if request.values.get("seed")]
        assert all(event.wait(PATIENCE_S) for event in left)
    outcomes = sorted(result.cancelled for _, result, _ in served.ended)
    assert outcomes == [False, True, True]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_of_one_sequence_ends_all(served: Served, streamed: bool) -> None:
    def scripted(request: Request) -> Iterable[Part]:
        return [event(error="it broke")] if request.values["seed"] == 1 else [HANG]

    served.triton.answer_with(scripted)
    before = len(served.triton.requests)
    body = {"model": "small", "prompt": "a", "n": 3, "seed": 0, "stream": streamed}
    assert "it broke" in served.post("/v1/completions", body).json()["error"]["message"]
    assert wait(lambda: served.admission.running == 0)
    left = [one.left for one in served.triton.requests[before:] if one.values["seed"] != 1]
    assert all(event.wait(PATIENCE_S) for event in left)
    errors = [error for _, _, error in served.ended if error is not None]
    assert [type(error) for error in errors] == [TritonUnknownError]
    assert sum(result.cancelled for _, result, _ in served.ended) == 2


# Guided answers, biases and stop tokens, in OpenAI's spelling and vLLM's.

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = 'root ::= "a"'
JSON_FORM = {"response_format": {"type": "json_object"}}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(("path", "prompt"), PATHS)
@pytest.mark.parametrize(
    ("fields", "kind", "guide"),
    [
        (JSON_FORM, "json_schema", '{"type":"object"}'),
        (form(SCHEMA), "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": {}, "guided_json_object": False}, "json_schema", "{}"),
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_choice": ["yes", "no."]}, "regex", r"yes|no\."),
        ({"guided_grammar": GRAMMAR}, "ebnf_grammar", GRAMMAR),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "regex", "a|b"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, "ebnf_grammar", GRAMMAR),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"guided_json": None}, None, None),
    ],
)
def test_guides_reach_the_engine(
    served: Served,
    path: str,
    prompt: dict[str, Any],
    fields: dict[str, Any],
    kind: str | None,
    guide: str | None,
) -> None:
    served.ask(path, **prompt, **fields)
    assert served.sent.get("guided_decoding_guide_type") == kind
    assert served.sent.get("guided_decoding_guide") == guide


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (form({"not": {}}), "response_format.json_schema.schema.not: "),
        ({"guided_regex": "(a"}, "guided_regex: "),
        ({"guided_regex": ""}, "guided_regex: "),
        ({"guided_choice": []}, "guided_choice: "),
        ({"guided_grammar": ""}, "guided_grammar: "),
        ({"structured_outputs": {}}, "structured_outputs: "),
        ({"guided_json": {"pattern": "a"}}, "guided_json.pattern: "),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice: "),
        ({"guided_regex": "a", **JSON_FORM}, "guided_regex: "),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx: "),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern="),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"allowed_token_ids": [1, 5000]}, "allowed_token_ids: "),
        ({"logit_bias": {"x": 5}}, "logit_bias: "),
        ({"logit_bias": {"1": 101}}, "logit_bias.1=101: "),
        ({"logit_bias": {"5000": 1}}, "logit_bias: "),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias="),
        ({"stop_token_ids": [5000]}, "stop_token_ids: "),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids: "),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    served: Served, fields: dict[str, Any], named: str
) -> None:
    error = served.refusal("completions", prompt="a", **fields)
    assert error["message"].startswith(f"E1005 InvalidArgument: {named}")
    assert error["param"] in fields


def test_tools_are_not_guided_by_an_expression(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = served.refusal("chat/completions", **CHAT, tools=tools, guided_regex="a")
    assert error["param"] == "guided_regex"


@pytest.mark.parametrize(
    ("abilities", "refused"),
    [
        (
            Abilities(),
            [
                {"guided_regex": "a"},
                JSON_FORM,
                {"min_p": 0.5},
                {"logit_bias": {"1": 5}},
                {"allowed_token_ids": [1]},
                {"logprobs": 1},
                {"echo": True, "logprobs": 0},
            ],
        ),
        (
            Abilities(guides={"json_schema"}, top_log_probs=3),
            [{"structured_outputs": {"grammar": GRAMMAR}}, {"logprobs": 4}, {"max_tokens": 0}],
        ),
    ],
)
def test_a_field_that_the_engine_cannot_honour_is_refused_by_name(
    abilities: Abilities, refused: list[dict[str, Any]]
) -> None:
    with api(THREE, abilities=abilities) as served:
        for fields in refused:
            error = served.refusal("completions", prompt="a", **fields)
            assert error["param"] == next(iter(fields))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("at_least", "expected"), [(0, "a"), (3, "abc")])
def test_stop_tokens_end_the_text_before_them(
    served: Served, streamed: bool, at_least: int, expected: str
) -> None:
    ids = TOKENIZER.encode("abcbd")
    values = [-float(place) for place in range(len(ids))]
    served.triton.answer_with([event(output_ids=ids, output_log_probs=values)])
    fields = {"stop_token_ids": [ids[1]], "logprobs": 0, "min_tokens": at_least, **TEXT}
    if streamed:
        pieces = [chunk["choices"][0] for chunk in served.events("completions", **fields)]
    else:
        pieces = served.ask("completions", **fields)["choices"]
    assert "".join(piece["text"] for piece in pieces) == expected
    assert pieces[-1]["finish_reason"] == "stop"
    found = [piece["logprobs"]["token_logprobs"] for piece in pieces if piece["logprobs"]]
    assert [value for each in found for value in each] == values[: len(expected)]


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = make_engine(tmp_path_factory.mktemp("engines"))
    transport = EngineTransport(MockEngine(read_model(directory), MockOptions(tps=0)))
    tokenizer, abilities = EngineTokenizer.load(directory), MockFamily.open(directory).abilities
    with api(THREE, tokenizer=tokenizer, abilities=abilities, transport=transport) as running:
        yield running
    transport.close()


def test_only_a_limit_of_the_clients_own_is_refused_for_log_probabilities(
    mock: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 x 2 log probabilities a token, 120 are those of 20 tokens."""
    monkeypatch.setattr(sequences, "MAX_LOG_PROBS", 120)
    body = {"n": 2, "logprobs": True, "top_logprobs": 2, **CHAT}
    for choice in mock.ask("chat/completions", **body)["choices"]:
        assert 0 < len(choice["logprobs"]["content"]) <= 20
    assert mock.refusal("chat/completions", **body, max_tokens=21)["param"] == "logprobs"
