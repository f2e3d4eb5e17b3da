"""OpenAI's own client against our HTTP server, over a Triton that answers as told."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import httpx
import openai
import pytest
from chat_templates import QWEN
from scripted_server import (
    HANG,
    PATIENCE_S,
    RESET,
    Answer,
    ScriptedServer,
    event,
    serving,
    stream,
)
from small_tokenizers import byte_level

from cog_triton import errors
from cog_triton.engines.base import EngineLimits
from cog_triton.errors import CogTritonError, TritonUnavailable, TritonUnknownError
from cog_triton.serving.admission import Admission
from cog_triton.serving.generate import Generation, TextGenerator
from cog_triton.serving.http import create_app
from cog_triton.serving.http_server import HTTPServer, bind
from cog_triton.serving.metrics import Metrics
from cog_triton.serving.openai_api import OpenAI
from cog_triton.serving.openai_schema import openapi
from cog_triton.settings import load_settings
from cog_triton.tokenizer import EngineTokenizer
from cog_triton.triton.client import TritonClient

TOKENIZER = EngineTokenizer(
    byte_level(), chat_template=QWEN, bos_token="<|im_start|>", eos_token="<|im_end|>"
)
USER = [{"role": "user", "content": "Hi"}]


def tokens(*texts: str, **values: Any) -> list[bytes]:
    return [event(output_ids=TOKENIZER.encode(text), **values) for text in texts]


@dataclass
class Served:
    url: str
    triton: ScriptedServer
    metrics: Metrics
    door: Admission
    ended: list[tuple[Generation, BaseException | None]] = field(default_factory=list)
    trouble: CogTritonError | None = None

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options}
        )

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return httpx.post(f"{self.url}{path}", timeout=PATIENCE_S, **options)

    def require_ready(self) -> None:
        if self.trouble is not None:
            raise self.trouble


class Seen(Metrics):
    """Remembers what became of generations."""

    def __init__(self) -> None:
        super().__init__()
        self.generations: list[tuple[Generation, BaseException | None]] = []

    def ended(self, generation: Generation, error: BaseException | None) -> None:
        super().ended(generation, error)
        self.generations.append((generation, error))


@contextmanager
def api(
    answer: Answer, *, slots: int = 4, queue: float = 8, guides: bool = False, **options: Any
) -> Iterator[Served]:
    settings = load_settings(served_model_name="small", **options)
    limits = EngineLimits(
        max_input_len=900, max_seq_len=1000, max_batch_size=slots, end_id=None, pad_id=None
    )
    metrics, door = Seen(), Admission(slots, queue)
    with serving(answer) as triton:
        client = TritonClient(
            triton.url,
            2 * PATIENCE_S,
            lambda text: errors.from_text(text) or TritonUnknownError(text),
        )
        generator = TextGenerator(settings, limits, TOKENIZER, client, door, observer=metrics)
        listening = bind("OPENAI_PORT", "127.0.0.1", 0)
        served = Served(f"http://127.0.0.1:{listening.getsockname()[1]}", triton, metrics, door)
        served.ended = metrics.generations
        key = settings.openai_api_key
        app = create_app(
            OpenAI(settings, TOKENIZER, generator, "small", guides=guides).routes(),
            require_ready=served.require_ready,
            api_key=key.get_secret_value() if key else None,
            on_refused=metrics.refused,
        )
        server = HTTPServer(app, listening)
        server.start()
        try:
            yield served
        finally:
            server.stop()
            asyncio.run(client.aclose())


THREE = stream(*tokens("the ", "quick ", "größer"))


def test_a_chat_is_rendered_generated_and_counted() -> None:
    with api(THREE) as served:
        answer = served.client().chat.completions.create(
            model="small", messages=USER, temperature=0, max_tokens=90, seed=5
        )
        sent = served.triton.requests[0].json
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "the quick größer")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert (answer.object, answer.model) == ("chat.completion", "small")
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sent["input_ids"] == TOKENIZER.encode(text, add_special_tokens=False)
    assert (sent["temperature"], sent["request_output_len"], sent["seed"]) == (0, 90, 5)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(sent["input_ids"])
    assert answer.usage.completion_tokens == sum(
        len(TOKENIZER.encode(text)) for text in ("the ", "quick ", "größer")
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_tells_each_piece_as_it_is_made() -> None:
    texts = ["the ", "quick ", "fox"]
    seen = [Event() for _ in texts]
    parts = [part for both in zip(tokens(*texts), seen, strict=True) for part in both]
    with api(stream(*parts)) as served:
        chunks = served.client().chat.completions.create(
            model="small", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        first = next(chunks)
        assert first.choices[0].delta.role == "assistant"
        said = first.choices[0].delta.content or ""
        for text, it in zip(texts, seen, strict=True):
            while not said.endswith(text):
                said += next(chunks).choices[0].delta.content or ""
            it.set()
        closing, usage = list(chunks)
    assert said == "the quick fox"
    assert closing.choices[0].finish_reason == "stop"
    assert closing.usage is None
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == sum(len(TOKENIZER.encode(text)) for text in texts)


def test_the_stream_on_the_wire() -> None:
    body = {"model": "small", "messages": USER, "stream": True}
    with api(THREE) as served:
        answer = served.post("/v1/chat/completions", body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    pieces = [json.loads(line.removeprefix("data: ")) for line in events]
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
    assert len({piece["id"] for piece in pieces}) == 1
    assert pieces[0]["id"] == answer.headers["x-request-id"]
    assert not any("usage" in piece for piece in pieces)
    said = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert said == "the quick größer"


def test_completions_whole_and_streamed() -> None:
    with api(THREE) as served:
        client = served.client()
        whole = client.completions.create(model="small", prompt="the quick", max_tokens=90)
        pieces = list(client.completions.create(model="small", prompt=[1, 2], stream=True))
        sent = [request.json for request in served.triton.requests]
    assert (whole.object, whole.choices[0].text) == ("text_completion", "the quick größer")
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(piece.choices[0].text for piece in pieces) == "the quick größer"
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert sent[0]["input_ids"] == TOKENIZER.encode("the quick")
    assert sent[1]["input_ids"] == [1, 2]
    assert sent[1]["request_output_len"] == 998


def test_a_stop_string_ends_the_answer_before_it() -> None:
    with api(THREE) as served:
        answer = served.client().chat.completions.create(
            model="small", messages=USER, stop=["zzz", "ick g"]
        )
    assert answer.choices[0].message.content == "the qu"
    assert answer.choices[0].finish_reason == "stop"


def test_the_servers_own_stops_and_system_prompt_hold_unless_said_otherwise() -> None:
    with api(THREE, stop_sequences="quick", system_prompt="Rhyme.") as served:
        chat = served.client().chat.completions
        assert chat.create(model="small", messages=USER).choices[0].message.content == "the "
        rest = chat.create(model="small", messages=USER, stop="r")
        assert rest.choices[0].message.content == "the quick g"
        ids = served.triton.requests[0].json["input_ids"]
    assert "Rhyme." in TOKENIZER.tokenizer.decode(ids)


def test_length_ends_with_length() -> None:
    count = len(TOKENIZER.encode("the "))
    with api(stream(*tokens("the "))) as served:
        answer = served.client().completions.create(model="small", prompt="a", max_tokens=count)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_the_chosen_tokens(streamed: bool) -> None:
    ids = TOKENIZER.encode("größer")
    parts = [event(output_ids=token, output_log_probs=-0.5 * n) for n, token in enumerate(ids)]
    with api(stream(*parts)) as served:
        chat = served.client().chat.completions
        if streamed:
            content = [
                item
                for piece in chat.create(model="small", messages=USER, logprobs=True, stream=True)
                if piece.choices[0].logprobs
                for item in piece.choices[0].logprobs.content or []
            ]
        else:
            answer = chat.create(model="small", messages=USER, logprobs=True, top_logprobs=0)
            assert answer.choices[0].logprobs
            content = list(answer.choices[0].logprobs.content or [])
        assert served.triton.requests[0].json["return_log_probs"] is True
    assert [item.logprob for item in content] == [-0.5 * place for place in range(len(ids))]
    assert bytes(byte for item in content for byte in item.bytes or []) == "größer".encode()
    assert all(item.top_logprobs == [] for item in content)


def test_log_probabilities_of_a_completion() -> None:
    ids = TOKENIZER.encode("the fox")
    whole = stream(event(output_ids=ids, output_log_probs=[-1.0] * len(ids)))
    with api(whole) as served:
        answer = served.client().completions.create(model="small", prompt="a", logprobs=0)
    found = answer.choices[0].logprobs
    assert found is not None
    assert "".join(found.tokens or []) == "the fox"
    assert found.token_logprobs == [-1.0] * len(ids)
    assert found.text_offset is not None
    assert [
        ("the fox")[place:].startswith(token)
        for place, token in zip(found.text_offset, found.tokens or [], strict=True)
    ] == [True] * len(ids)


def test_an_engine_that_gives_no_log_probabilities_is_told_so() -> None:
    with api(THREE) as served, pytest.raises(openai.InternalServerError, match="E2104"):
        served.client().chat.completions.create(model="small", messages=USER, logprobs=True)


def test_ignore_eos_and_other_extras_reach_the_engine() -> None:
    with api(THREE) as served:
        served.client().chat.completions.create(
            model="small",
            messages=USER,
            extra_body={"ignore_eos": True, "top_k": 7, "repetition_penalty": 1.5, "min_tokens": 2},
        )
        sent = served.triton.requests[0].json
    assert (sent["end_id"], sent["runtime_top_k"]) == (-1, 7)
    assert (sent["repetition_penalty"], sent["min_tokens"]) == (1.5, 2)


def test_models() -> None:
    with api(THREE) as served:
        (model,) = served.client().models.list().data
        assert (model.id, model.object, model.owned_by) == ("small", "model", "cog-triton")
        assert served.client().models.retrieve("small").id == "small"
        with pytest.raises(openai.NotFoundError, match="E1009"):
            served.client().models.retrieve("large")
        with pytest.raises(openai.NotFoundError, match=r"'large'.*'small'"):
            served.client().completions.create(model="large", prompt="Hi")


FAILURES = [
    ("E2101 TritonTimeout: slow", 504, "server_error"),
    ("E2105 TritonUnavailable: gone", 503, "server_error"),
    ("E2107 Overloaded: full", 429, "rate_limit_error"),
    ("E2100 TritonUnknownError: odd", 500, "server_error"),
    ("something else", 500, "server_error"),
    ("E1005 InvalidArgument: top_p=7: no", 400, "invalid_request_error"),
    ("E1002 PromptTooLong: too long", 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("text", "status", "kind"), FAILURES)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_before_the_first_token_has_its_status(
    text: str, status: int, kind: str, streamed: bool
) -> None:
    body = {"model": "small", "messages": USER, "stream": streamed}
    with api(stream(event(error=text))) as served:
        answer = served.post("/v1/chat/completions", body)
    error = answer.json()["error"]
    code = text[:5] if text.startswith("E") else "E2100"
    assert (answer.status_code, error["type"], error["code"]) == (status, kind, code)
    assert error["message"].startswith(code)
    assert ("retry-after" in answer.headers) is (status in (429, 503))
    assert f'cog_triton_errors_total{{code="{code}"}} 1.0' in served.metrics.text().decode()


def test_an_error_in_the_middle_is_an_event_and_the_end() -> None:
    parts = [*tokens("the "), event(error="E2107 Overloaded: the KV cache is exhausted")]
    with api(stream(*parts)) as served:
        body = {"model": "small", "messages": USER, "stream": True}
        text = served.post("/v1/chat/completions", body).text
        last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "E2107"
        assert "[DONE]" not in text
        chunks = served.client().chat.completions.create(**body)
        with pytest.raises(openai.APIError, match="E2107 Overloaded") as caught:
            list(chunks)
    assert caught.value.code == "E2107"


def test_a_triton_that_breaks_in_the_middle_is_told() -> None:
    with api(stream(*tokens("the "), RESET)) as served:
        chunks = served.client().chat.completions.create(model="small", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="E2105"):
            list(chunks)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("first", [[], tokens("the ")])
def test_a_client_that_leaves_stops_the_engine(streamed: bool, first: list[bytes]) -> None:
    def answer(request: Any) -> list[Any]:
        return stream() if "stop" in request.json else stream(*first, HANG)

    body = json.dumps({"model": "small", "messages": USER, "stream": streamed}).encode()
    with api(answer) as served:
        address = served.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
                b"\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            request = served.triton.request(0)
        assert first or request.left.wait(PATIENCE_S)  # else it may be gone before a byte is sent
        assert wait(lambda: served.ended)
        (generation, error), *_ = served.ended
    assert generation.ticket.cancelled
    assert error is not None
    assert "cog_triton_requests_cancelled_total 1.0" in served.metrics.text().decode()


def wait(condition: Any) -> Any:
    deadline = Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if value := condition():
            return value
        deadline.wait(0.01)
    return condition()


def test_more_than_the_queue_holds_is_429_at_once_though_it_streams() -> None:
    with api(stream(*tokens("the "), HANG), slots=1, queue=0) as served:
        client = served.client()
        running = client.chat.completions.create(model="small", messages=USER, stream=True)
        next(running)
        with pytest.raises(openai.RateLimitError, match="E2107") as caught:
            client.chat.completions.create(model="small", messages=USER, stream=True)
        assert caught.value.response.headers["retry-after"] == "1"
        running.close()


def test_the_head_comes_while_a_request_waits_long_for_its_turn() -> None:
    with api(stream(HANG), slots=1) as served:
        body = {"model": "small", "messages": USER, "stream": True}
        with httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE_S
        ) as answer:
            assert answer.status_code == 200
            assert "assistant" in next(answer.iter_lines())


def test_health_and_readiness() -> None:
    with api(THREE) as served:
        assert httpx.get(f"{served.url}/health").json() == {"status": "ready"}
        served.trouble = TritonUnavailable("being restarted")
        answer = httpx.get(f"{served.url}/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "E2105"


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, False),
        ({"Authorization": "Bearer wrong"}, False),
        ({"Authorization": "secret"}, False),
        ({"Authorization": "Basic secret"}, False),
        ({"Authorization": "Bearer secretsecret"}, False),
        ({"Authorization": b"Bearer \xff\xfe"}, False),
        ({"Authorization": "Bearer secret"}, True),
    ],
)
def test_the_api_key(headers: dict[str, Any], allowed: bool) -> None:
    with api(THREE, openai_api_key="secret") as served:
        raw = [
            (name.encode(), v if isinstance(v, bytes) else v.encode())
            for name, v in headers.items()
        ]
        for path in ("/v1/models", "/v1/none"):
            answer = httpx.get(f"{served.url}{path}", headers=raw)
            assert (answer.status_code == 401) is not allowed
            if not allowed:
                assert answer.json()["error"]["code"] == "E1007"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "secret" not in answer.text
        assert httpx.get(f"{served.url}/health").status_code == 200


def test_the_client_knows_a_wrong_key() -> None:
    with api(THREE, openai_api_key="secret") as served:
        with pytest.raises(openai.AuthenticationError):
            served.client().models.list()
        assert served.client(api_key="secret").models.list().data


def test_a_body_that_is_too_long_is_413_told_or_not() -> None:
    with api(THREE, max_request_bytes=1000) as served:
        long = {"model": "small", "prompt": "x" * 2000}
        told = served.post("/v1/completions", long)
        raw = json.dumps(long).encode()
        untold = served.post(
            "/v1/completions",
            content=iter([raw[:900], raw[900:]]),
            headers={"Content-Type": "application/json"},
        )
        for answer in (told, untold):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "E1008"
            assert "MAX_REQUEST_BYTES" in answer.text
        assert served.post("/v1/completions", {**long, "prompt": "x"}).status_code == 200


JSON_TYPE = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", JSON_TYPE, 400),
        (b"{", JSON_TYPE, 400),
        (b"\xff\xfe", JSON_TYPE, 400),
        (b'{"model": NaN}', JSON_TYPE, 400),
        (b'{"model": 1e999}', JSON_TYPE, 400),
        (b'{"seed": ' + b"9" * 9000 + b"}", JSON_TYPE, 400),
        (b"[" * 100_000, JSON_TYPE, 400),
        (b'{"model": "\\ud83e", "prompt": "x"}', JSON_TYPE, 404),
        (b'{"model": "small", "prompt": "\\ud83e"}', JSON_TYPE, 400),
        (b'{"model": "small", "prompt": "x", "\\ud83e": 1}', JSON_TYPE, 400),
        (b'{"model": "small", "prompt": [99999]}', JSON_TYPE, 400),
        (b'{"model": "small", "prompt": [-1]}', JSON_TYPE, 400),
        (b'{"model": "small", "prompt": ""}', JSON_TYPE, 400),
        (b'{"model": "small", "prompt": [[]]}', JSON_TYPE, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {}, 415),
    ],
)
def test_garbage_is_refused_with_a_code(
    content: bytes, headers: dict[str, str], status: int
) -> None:
    with api(THREE) as served:
        answer = served.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"].startswith("E1")
        assert served.triton.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("GET", "/v1/models/%00%ff", 404),
    ],
)
def test_paths_and_methods_that_are_not_there(method: str, path: str, status: int) -> None:
    with api(THREE) as served:
        answer = httpx.request(method, f"{served.url}{path}")
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == "E1009"


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object"}},
            }
        },
    ],
)
def test_guided_decoding_is_refused_where_there_is_none(extra: dict[str, Any]) -> None:
    with api(THREE) as served, pytest.raises(openai.BadRequestError, match="guided decoding") as e:
        served.client().chat.completions.create(model="small", messages=USER, **extra)
    assert e.value.param == "response_format"


@pytest.mark.parametrize(
    ("form", "guide"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}},
            {"const": 7},
        ),
    ],
)
def test_guides_reach_the_engine_that_follows_them(form: dict[str, Any], guide: Any) -> None:
    with api(THREE, guides=True) as served:
        body = {"model": "small", "messages": USER, "response_format": form}
        assert served.post("/v1/chat/completions", body).status_code == 200
        sent = served.triton.requests[0].json
    assert sent["guided_decoding_guide_type"] == "json_schema"
    assert json.loads(sent["guided_decoding_guide"]) == guide


def test_a_schema_that_could_harm_the_engine_never_reaches_it() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"pattern": "("}}}
    with api(THREE, guides=True) as served:
        body = {"model": "small", "messages": USER, "response_format": schema}
        answer = served.post("/v1/chat/completions", body)
        assert served.triton.requests == []
    assert answer.status_code == 400
    assert "response_format.json_schema.schema.pattern: not supported" in answer.text
    assert answer.json()["error"]["param"] == "response_format"


def test_a_prompt_that_is_too_long_has_openais_word_and_our_code() -> None:
    with api(THREE) as served, pytest.raises(openai.BadRequestError) as caught:
        served.client().completions.create(model="small", prompt=[1] * 901)
    assert caught.value.code == "E1002"
    assert "context_length_exceeded" in str(caught.value)
    assert "901" in str(caught.value)


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.InvalidArgument, match=f"OPENAI_PORT={port}: cannot listen"):
            bind("OPENAI_PORT", "127.0.0.1", port)


def test_the_document_names_what_is_served() -> None:
    document = openapi()
    assert set(document["paths"]) == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/chat/completions",
        "/v1/completions",
        "/health",
    }
    assert "$defs" not in json.dumps(document)
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"model", "messages", "temperature", "response_format", "seed"} <= set(fields)
