"""OpenAI API errors, seen by OpenAI's own client."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
from openai_server import THREE, USER, api, tokens, wait
from scripted_server import HANG, PATIENCE_S, RESET
from scripted_triton import event

from cog_triton import errors
from cog_triton.errors import TritonUnavailable
from cog_triton.serving.openai.schema import openapi
from cog_triton.system.ports import bind

FAILURES = [
    ("E2101 TritonTimeout: slow", 504, "server_error"),
    ("E2105 TritonUnavailable: gone", 503, "server_error"),
    ("E2107 Overloaded: full", 429, "rate_limit_error"),
    ("E2100 TritonUnknownError: odd", 500, "server_error"),
    ("E2108 FatalRequest: the engine died of it", 422, "invalid_request_error"),
    ("something else", 500, "server_error"),
    ("E1005 InvalidArgument: top_p=7: no", 400, "invalid_request_error"),
    ("E1002 PromptTooLong: too long", 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("text", "status", "kind"), FAILURES)
@pytest.mark.parametrize("streamed", [False, True])
def test_error_before_the_first_token_sets_the_status(
    text: str, status: int, kind: str, streamed: bool
) -> None:
    body = {"model": "small", "messages": USER, "stream": streamed}
    with api([event(error=text)]) as served:
        answer = served.post("/v1/chat/completions", body)
    error = answer.json()["error"]
    code = text[:5] if text.startswith("E") else "E2100"
    assert (answer.status_code, error["type"]) == (status, kind)
    assert answer.headers["x-error-code"] == code
    openais = {"E2107": "rate_limit_exceeded", "E1002": "context_length_exceeded"}
    assert error["code"] == openais.get(code, code)
    assert error["message"].startswith(code)
    assert ("retry-after" in answer.headers) is (status in (429, 503))
    assert f'cog_triton_errors_total{{code="{code}"}} 1.0' in served.metrics.text().decode()


@pytest.mark.parametrize(
    ("text", "kind", "asked"),
    [
        ("E2108 FatalRequest: the engine died of it", openai.UnprocessableEntityError, 1),
        ("E2100 TritonUnknownError: odd", openai.InternalServerError, 2),
    ],
)
def test_openai_client_sends_no_request_again_that_kills_engines(
    text: str, kind: type[openai.APIStatusError], asked: int
) -> None:
    with api([event(error=text)]) as served:
        with pytest.raises(kind, match=text):
            served.client(max_retries=1).chat.completions.create(model="small", messages=USER)
        assert len(served.triton.requests) == asked


def test_error_after_tokens_is_the_last_event() -> None:
    parts = [*tokens("the "), event(error="E2107 Overloaded: the KV cache is exhausted")]
    with api(parts) as served:
        body = {"model": "small", "messages": USER, "stream": True}
        text = served.post("/v1/chat/completions", body).text
        last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "rate_limit_exceeded"
        assert "[DONE]" not in text
        chunks = served.client().chat.completions.create(**body)
        with pytest.raises(openai.APIError, match="E2107 Overloaded") as caught:
            list(chunks)
    assert caught.value.code == "rate_limit_exceeded"


def test_broken_triton_connection_is_an_error_event() -> None:
    with api([*tokens("the "), RESET]) as served:
        chunks = served.client().chat.completions.create(model="small", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="E2105"):
            list(chunks)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("first", [[], tokens("the ")])
def test_disconnect_stops_the_engine(streamed: bool, first: list[Any]) -> None:
    body = json.dumps({"model": "small", "messages": USER, "stream": streamed}).encode()
    with api([*first, HANG]) as served:
        address = served.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as connection:
            # A close so soon could be that of one half of the connection.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            request = served.triton.request(0)
        assert request.left.wait(PATIENCE_S)
        assert wait(lambda: served.ended)
        (_, result, error), *_ = served.ended
    assert result.cancelled
    assert error is not None
    assert "cog_triton_requests_cancelled_total 1.0" in served.metrics.text().decode()


def test_full_queue_is_429_even_for_streams() -> None:
    with api([*tokens("the "), HANG], slots=1, queue=0) as served:
        client = served.client()
        running = client.chat.completions.create(model="small", messages=USER, stream=True)
        next(running)
        with pytest.raises(openai.RateLimitError, match="E2107") as caught:
            client.chat.completions.create(model="small", messages=USER, stream=True)
        assert caught.value.response.headers["retry-after"] == "1"
        running.close()


def test_headers_are_sent_while_a_request_is_queued() -> None:
    with api([HANG], slots=1) as served:
        body = {"model": "small", "messages": USER, "stream": True}
        with httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE_S
        ) as answer:
            assert answer.status_code == 200
            assert "assistant" in next(answer.iter_lines())


def test_health_reports_readiness() -> None:
    with api(THREE) as served:
        assert httpx.get(f"{served.url}/health").json() == {"status": "ready"}
        served.failure = TritonUnavailable("being restarted")
        answer = httpx.get(f"{served.url}/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "E2105"


def test_too_large_body_is_413_with_or_without_content_length() -> None:
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


def test_too_long_prompt_has_openais_code_and_ours() -> None:
    with api(THREE) as served, pytest.raises(openai.BadRequestError) as caught:
        served.client().completions.create(model="small", prompt=[1] * 901)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.response.headers["x-error-code"] == "E1002"
    assert "context_length_exceeded" in str(caught.value)
    assert "is longer than the model's context length" in str(caught.value)  # litellm looks for it
    assert "901" in str(caught.value)


def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.InvalidArgument, match=f"OPENAI_PORT={port}: cannot listen"):
            bind("OPENAI_PORT", "127.0.0.1", port, 64)


def test_openapi_schema_lists_the_routes() -> None:
    document = openapi()
    assert set(document["paths"]) == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/version",
        "/health",
    }
    assert "$defs" not in json.dumps(document)
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["n"]["anyOf"][0]["minimum"] == 1
    schemas = document["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["best_of"]["anyOf"][0]["minimum"] == 1
    for name, kinds in {
        "ResponsesRequest": ("max_output_tokens", "min_p", "input"),
        "MessagesRequest": ("thinking", "min_p", "messages"),
        "ChatRequest": ("logit_bias", "min_p", "tools"),
    }.items():
        assert {*kinds} <= schemas[name]["properties"].keys()
    for field, value, fits in [
        ("messages", USER, True),
        ("messages", [], False),
        ("messages", [{"role": "nobody"}], False),
        ("min_p", 0.5, True),
        ("min_p", 2, False),
    ]:
        validator = jsonschema_rs.Draft202012Validator(
            {**document, "$ref": "#/components/schemas/ChatRequest"}
        )
        assert validator.is_valid({"model": "m", "messages": USER, field: value}) == fits
