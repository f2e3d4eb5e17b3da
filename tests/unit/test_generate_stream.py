"""Client of generate_stream against a real HTTP server: good, malformed and missing responses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from scripted_server import (
    HANG,
    PATIENCE_S,
    RESET,
    Part,
    ScriptedServer,
    event,
    serving,
    stream,
    wait_until,
    whole,
)

from cog_triton.engines.generate_stream import GenerateEndpoint, to_error
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonTimeout,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.system.ports import free_ports

VALUES = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 9, "streaming": True}
Events = list[dict[str, Any]]


@contextmanager
def connected(
    answer: Sequence[Part],
) -> Iterator[tuple[GenerateEndpoint, ScriptedServer]]:
    with serving(answer) as server:
        endpoint = GenerateEndpoint("tensorrt_llm", to_error)
        endpoint.port = urlsplit(server.url).port or 0
        yield endpoint, server


def read(
    answer: Sequence[Part], timeout: float = 2 * PATIENCE_S
) -> tuple[Events, CogTritonError | None]:
    """All events that arrive, and the error that ends the stream."""
    events: Events = []
    with connected(answer) as (endpoint, _):
        try:
            for found in endpoint.request(VALUES, "id", timeout).events():
                events.append(found)
        except CogTritonError as error:
            return events, error
    return events, None


def ids(*tokens: Any) -> Events:
    return [{"output_ids": token} for token in tokens]


def test_request_has_path_inputs_and_id_and_is_sent_on_first_read() -> None:
    with connected(stream(event(output_ids=7), event(output_ids=[8, 9]))) as (endpoint, server):
        endpoint.request(VALUES, "never").events()
        assert list(endpoint.request(VALUES, "12-1").events()) == ids(7, [8, 9])
    (request,) = server.requests
    assert request.path == "/v2/models/tensorrt_llm/generate_stream"
    assert request.json == {**VALUES, "id": "12-1"}


def test_empty_stream_has_no_events() -> None:
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


@pytest.mark.parametrize("before", [[], [1]], ids=["at once", "after a token"])
def test_no_bytes_within_the_timeout_is_e2101(before: list[int]) -> None:
    events = [event(output_ids=token) for token in before]
    answer = [*stream(*events, end=False), HANG] if before else [HANG]
    found, error = read(answer, timeout=0.2)
    while found != ids(*before):  # the first token was late, too
        assert isinstance(error, TritonTimeout)
        found, error = read(answer, timeout=0.2)
    assert isinstance(error, TritonTimeout)
    assert re.search(r"\b0\.2 ?s", str(error)), "how long it waited"


def test_no_listener_is_e2105_that_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.delenv("TRITON_HOST", raising=False)
    monkeypatch.setenv("TRITON_HTTP_PORT", str(port))
    events = GenerateEndpoint("m", to_error).request({}, "id").events()
    with pytest.raises(TritonUnavailable, match=f"127.0.0.1:{port} .TRITON_HOST"):
        list(events)


def test_address_is_that_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_HOST", raising=False)
    monkeypatch.delenv("TRITON_HTTP_PORT", raising=False)
    found = GenerateEndpoint("m", to_error)
    assert (found.host, found.port) == ("127.0.0.1", 8000)
    monkeypatch.setenv("TRITON_HOST", "::1")
    monkeypatch.setenv("TRITON_HTTP_PORT", "8123")
    found = GenerateEndpoint("m", to_error)
    assert (found.host, found.port) == ("::1", 8123)


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert read(stream(event(output_ids=3))) == (ids(3), None)


def test_closing_the_iterator_closes_the_connection() -> None:
    with connected([*stream(event(output_ids=1), end=False), HANG]) as (endpoint, server):
        with closing(endpoint.request({}, "id").events()) as events:
            assert next(events) == {"output_ids": 1}
            assert not server.request().left.is_set()
        assert server.request().left.wait(PATIENCE_S)


@pytest.mark.parametrize("before", [[], [1], [1, 2]], ids=["head", "first token", "more tokens"])
def test_abort_ends_a_waiting_reader(before: list[int]) -> None:
    events = [event(output_ids=token) for token in before]
    answer = [*stream(*events, end=False), HANG] if before else [HANG]
    seen: Events = []
    with ThreadPoolExecutor() as pool, connected(answer) as (endpoint, server):
        request = endpoint.request({}, "id")

        def read_on() -> None:
            for found in request.events():
                seen.append(found)

        reader = pool.submit(read_on)
        arrived = server.request()
        wait_until(lambda: seen == ids(*before))
        request.abort()
        assert arrived.left.wait(PATIENCE_S)
        with pytest.raises(TritonUnavailable):
            reader.result(PATIENCE_S)
    assert seen == ids(*before)


def test_aborted_request_is_not_sent() -> None:
    with connected(stream(event(output_ids=1))) as (endpoint, server):
        request = endpoint.request({}, "aborted")
        request.abort()
        with pytest.raises(TritonUnavailable, match="hung up"):
            list(request.events())
        # Connections are accepted in order, so what came before this one has been read.
        assert list(endpoint.request({}, "other").events()) == ids(1)
        request.abort()
    assert [request.json["id"] for request in server.requests] == ["other"]


def test_stop_is_a_request_with_the_same_id() -> None:
    with connected(stream()) as (endpoint, server):
        endpoint.stop("a-1")
    assert server.requests[0].json["id"] == "a-1"
    assert server.requests[0].json["stop"] is True
    with connected([RESET]) as (endpoint, _), pytest.raises(TritonUnavailable):
        endpoint.stop("7-1")


def test_it_needs_no_wheels() -> None:
    """NVIDIA's container has stubs run in its own Python."""
    code = "import sys, cog_triton.engines.generate_stream\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"httpx", "httptools", "pydantic", "numpy"} & {*done.stdout.split()}
