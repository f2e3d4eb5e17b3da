"""Client of generate_stream against a real HTTP server: good, malformed and missing responses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from scripted_server import RESET, Part, ScriptedServer, event, serving, stream, whole
from scripted_triton import to_error

from cog_triton.engines.generate_stream import GenerateStream
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.system.ports import free_ports

Events = list[dict[str, Any]]


@contextmanager
def connected(answer: Sequence[Part]) -> Iterator[tuple[GenerateStream, ScriptedServer]]:
    with pytest.MonkeyPatch.context() as patch, serving(answer) as server:
        patch.setenv("TRITON_HTTP_PORT", str(urlsplit(server.url).port))
        yield GenerateStream("tensorrt_llm", "12-1", {"input_ids": [1]}, to_error), server


def read(answer: Sequence[Part]) -> tuple[Events, CogTritonError | None]:
    """All events that arrive, and the error that ends the stream."""
    events: Events = []
    with connected(answer) as (request, _):
        try:
            for found in request.events():
                events.append(found)
        except CogTritonError as error:
            return events, error
    return events, None


def ids(*tokens: Any) -> Events:
    return [{"output_ids": token} for token in tokens]


def test_request_has_path_inputs_and_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with connected(stream(event(output_ids=7), event(output_ids=[8, 9]))) as (request, server):
        assert list(request.events()) == ids(7, [8, 9])
    (arrived,) = server.requests
    assert arrived.path == "/v2/models/tensorrt_llm/generate_stream"
    assert arrived.json == {"input_ids": [1], "id": "12-1"}
    assert read(stream()) == ([], None)


ENSEMBLE = "in ensemble 'ensemble', E1005 InvalidArgument: top_k=-1: must not be negative"


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (stream(event(error=ENSEMBLE), status="400 Bad Request"),
         InvalidArgument, "InvalidArgument: top_k=-1: must not be negative$"),
        (stream(event(error="the engine fell over")), TritonUnknownError, "fell over"),
        (stream(status="500 Internal Server Error"), TritonUnknownError, "HTTP 500"),
        ([whole(b'{"error": "E1005 InvalidArgument: x"}', "400 Bad")], InvalidArgument, "x"),
        ([whole(b'{"error": "unknown model"}', "404 Not Found")], TritonUnknownError, "unknown mo"),
        ([whole(b"<html>oops</html>", "500 Oops")], TritonUnknownError, "500.*oops"),
        ([whole(b"", "503 Service Unavailable")], TritonUnknownError, "503"),
        ([whole(b"[1]", "400 Bad Request")], TritonUnknownError, "400"),
        ([whole(b'{"detail": 1}', "400 Bad Request")], TritonUnknownError, "400"),
        ([whole(b"\xff\xfe", "400 Bad Request")], TritonUnknownError, "400"),
        (stream(b"data: {not json\n\n"), TritonMalformedJSON, "not json"),
        (stream(b"data: {'a': 1}\n\n"), TritonMalformedJSON, "'a'"),
        (stream(b"data: \xff\xfe\n\n"), TritonMalformedJSON, "not JSON"),
        (stream(b"data: {" + b"x" * 10**5 + b"\n\n"), TritonMalformedJSON, "^.{100,500}$"),
        (stream(b"data: [1]\n\n"), TritonMalformedEvent, r"\[1\]"),
        (stream(b"data: null\n\n"), TritonMalformedEvent, "null"),
        (stream(b'data: {"a"'), TritonMalformedEvent, "inside an event"),
        ([RESET], TritonUnavailable, "try again"),
        ([*stream(end=False), RESET], TritonUnavailable, "try again"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n", RESET], TritonUnavailable, "try again"),
    ],
)  # fmt: skip
def test_failures_are_coded(answer: Sequence[Part], kind: type[Exception], said: str) -> None:
    events, error = read(answer)
    assert events == []
    assert type(error) is kind
    assert re.search(said, str(error))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (stream(event(output_ids=1) + event(error="E1005 InvalidArgument: x")), InvalidArgument),
        (stream(event(output_ids=1), event(error="it fell over")), TritonUnknownError),
        (stream(event(output_ids=1), b"data: {\n\n"), TritonMalformedJSON),
        (stream(event(output_ids=1), b'data: "x"\n\n'), TritonMalformedEvent),
        (stream(event(output_ids=1), b'data: {"output_ids": 2'), TritonMalformedEvent),
        ([*stream(event(output_ids=1), end=False), RESET], TritonUnavailable),
    ],
)
def test_events_before_an_error_are_kept(answer: Sequence[Part], kind: type[Exception]) -> None:
    events, error = read(answer)
    assert events == ids(1)
    assert type(error) is kind


def test_no_listener_is_e2105_that_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.delenv("TRITON_HOST", raising=False)
    monkeypatch.setenv("TRITON_HTTP_PORT", str(port))
    with pytest.raises(TritonUnavailable, match=f"127.0.0.1:{port} .TRITON_HOST"):
        list(GenerateStream("m", "id", {}, to_error).events())


def test_an_aborted_request_is_not_sent() -> None:
    with connected(stream(event(output_ids=1))) as (request, server):
        request.abort()
        with pytest.raises(TritonUnavailable, match="hung up"):
            list(request.events())
    assert server.requests == []
