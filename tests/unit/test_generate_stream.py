"""HTTP client of Triton's stubs against a real HTTP server: good, malformed, missing responses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest
from scripted_server import (
    HANG,
    PATIENCE_S,
    RESET,
    Part,
    event,
    serving,
    stream,
    wait_until,
    whole,
)

from cog_triton import errors
from cog_triton.backend.generate_stream import GenerateEndpoint
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.system.ports import free_ports


def to_error(text: str) -> CogTritonError:
    return errors.from_text(text) or TritonUnknownError(text)


def endpoint(url: str) -> GenerateEndpoint:
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    return GenerateEndpoint(parts.hostname, parts.port, "tensorrt_llm", to_error)


def read(answer: Sequence[Part]) -> tuple[list[dict[str, Any]], CogTritonError | None]:
    """All events that arrive, and the error that ends the stream."""
    events = []
    with serving(answer) as server:
        try:
            for found in endpoint(server.url).request({"seed": 1}, "id").events():
                events.append(found)
        except CogTritonError as error:
            return events, error
    return events, None


def test_request_has_path_inputs_and_id() -> None:
    with serving(stream(event(output_ids=7), event(output_ids=[8, 9]))) as server:
        values = {"input_ids": [1, 2], "temperature": 0.5}
        found = list(endpoint(server.url).request(values, "a-1").events())
    assert found == [{"output_ids": 7}, {"output_ids": [8, 9]}]
    (request,) = server.requests
    assert request.path == "/v2/models/tensorrt_llm/generate_stream"
    assert request.json == {**values, "id": "a-1"}


def test_stop_is_a_request_with_the_same_id() -> None:
    with serving(stream()) as server:
        endpoint(server.url).stop("a-1")
    assert server.requests[0].json["id"] == "a-1"
    assert server.requests[0].json["stop"] is True


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (stream(event(error="E1005 InvalidArgument: x=1"), status="400 Bad Request"),
         InvalidArgument, "x=1"),
        (stream(event(error="the engine fell over")), TritonUnknownError, "fell over"),
        (stream(status="500 Internal Server Error"), TritonUnknownError, "HTTP 500"),
        ([whole(b'{"error": "unknown model"}', "404 Not Found")], TritonUnknownError, "unknown mo"),
        ([whole(b"<html>oops</html>", "500 Oops")], TritonUnknownError, "500.*oops"),
        (stream(b"data: {not json\n\n"), TritonMalformedJSON, "not json"),
        (stream(b"data: [1]\n\n"), TritonMalformedEvent, r"\[1\]"),
        (stream(b'data: {"a"'), TritonMalformedEvent, "inside an event"),
        ([RESET], TritonUnavailable, "TRITON_HTTP_PORT"),
        ([*stream(end=False), RESET], TritonUnavailable, "try again"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n", RESET], TritonUnavailable, "try again"),
    ],
)  # fmt: skip
def test_failures_are_coded(answer: Sequence[Part], kind: type[Exception], said: str) -> None:
    events, error = read(answer)
    assert events == []
    assert type(error) is kind
    assert re.search(said, str(error))


def test_events_before_an_error_are_kept() -> None:
    events, error = read(stream(event(output_ids=1) + event(error="E1005 InvalidArgument: x")))
    assert events == [{"output_ids": 1}]
    assert isinstance(error, InvalidArgument)


def test_no_listener_is_e2105_that_names_the_address() -> None:
    (port,) = free_ports(1)
    stub = GenerateEndpoint("127.0.0.1", port, "m", to_error)
    with pytest.raises(TritonUnavailable, match=f"127.0.0.1:{port} .TRITON_HOST"):
        list(stub.request({}, "id").events())


def test_address_is_that_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_HOST", raising=False)
    monkeypatch.delenv("TRITON_HTTP_PORT", raising=False)
    found = GenerateEndpoint.of_this_server("m", to_error)
    assert (found.host, found.port) == ("127.0.0.1", 8000)
    monkeypatch.setenv("TRITON_HOST", "::1")
    monkeypatch.setenv("TRITON_HTTP_PORT", "8123")
    found = GenerateEndpoint.of_this_server("m", to_error)
    assert (found.host, found.port) == ("::1", 8123)


@pytest.mark.parametrize("before", [[], [{"output_ids": 1}]])
def test_abort_ends_a_waiting_reader(before: list[dict[str, Any]]) -> None:
    answer = [*stream(*(event(**each) for each in before), end=False), HANG] if before else [HANG]
    seen = []
    with ThreadPoolExecutor() as pool, serving(answer) as server:
        request = endpoint(server.url).request({}, "id")

        def read_on() -> None:
            for found in request.events():
                seen.append(found)

        reader = pool.submit(read_on)
        arrived = server.request()
        wait_until(lambda: seen == before)
        request.abort()
        assert arrived.left.wait(PATIENCE_S)
        with pytest.raises(TritonUnavailable):
            reader.result(PATIENCE_S)
    assert seen == before


def test_aborted_request_is_not_sent() -> None:
    with serving(stream(event(output_ids=1))) as server:
        request = endpoint(server.url).request({}, "aborted")
        request.abort()
        with pytest.raises(TritonUnavailable, match="hung up"):
            list(request.events())
        list(endpoint(server.url).request({}, "other").events())
    assert [request.json["id"] for request in server.requests] == ["other"]


def test_closing_the_iterator_closes_the_connection() -> None:
    with serving([*stream(event(output_ids=1), end=False), HANG]) as server:
        with closing(endpoint(server.url).request({}, "id").events()) as events:
            assert next(events) == {"output_ids": 1}
        assert server.request().left.wait(PATIENCE_S)


def test_it_needs_no_wheels() -> None:
    """NVIDIA's container has stubs run in its own Python."""
    code = "import sys, cog_triton.backend.generate_stream\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"httpx", "httptools", "pydantic", "numpy"} & {*done.stdout.split()}
