"""Blocking Triton client against a real HTTP server: good, malformed and missing responses."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Event
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import (
    HANG,
    PATIENCE_S,
    RESET,
    Part,
    ScriptedServer,
    event,
    serving,
    stream,
    whole,
)

from cog_triton import errors
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonTimeout,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.triton.client import TritonClient
from cog_triton.triton.token_transport import as_list

VALUES = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 9, "streaming": True}


def ids_of(events: Iterator[list[dict[str, Any]]]) -> Generator[list[int], None, None]:
    """The ids in events, one list for each network read that has some."""
    with closing(events) as read:  # type: ignore[type-var]
        for found in read:
            if ids := [token for values in found for token in as_list(values["output_ids"])]:
                yield ids


def to_error(text: str) -> CogTritonError:
    return errors.from_text(text) or TritonUnknownError(text)


@contextmanager
def connected(
    answer: Sequence[Part], timeout: float = 2 * PATIENCE_S
) -> Iterator[tuple[TritonClient, ScriptedServer]]:
    with serving(answer) as server:
        yield TritonClient(server.url, timeout, to_error), server


def read(
    answer: Sequence[Part], timeout: float = 2 * PATIENCE_S
) -> tuple[list[int], CogTritonError | None]:
    """All ids that arrive, and the error that ends the stream."""
    ids: list[int] = []
    with connected(answer, timeout) as (client, _):
        try:
            for new in ids_of(client.events(client.request(VALUES))):
                assert new
                ids += new
        except CogTritonError as error:
            return ids, error
    return ids, None


def is_ready(url: str) -> bool:
    async def main() -> bool:
        async with TritonClient(url, PATIENCE_S, to_error) as client:
            return await client.is_ready()

    return asyncio.run(main())


def test_request_has_path_body_and_id() -> None:
    with connected(stream(event(output_ids=7))) as (client, server):
        assert list(ids_of(client.events(client.request(VALUES, "12-1")))) == [[7]]
        assert list(ids_of(client.events(client.request(VALUES)))) == [[7]]
    first, second = server.requests
    assert first.path == "/v2/models/tensorrt_llm/generate_stream"
    assert first.json == {**VALUES, "id": "12-1"}
    assert second.json == VALUES


def test_request_is_sent_on_first_read() -> None:
    with connected(stream(event(output_ids=7))) as (client, server):
        ids_of(client.events(client.request(VALUES, "never")))
        assert list(ids_of(client.events(client.request(VALUES, "read")))) == [[7]]
    assert [request.json["id"] for request in server.requests] == ["read"]


def test_empty_stream_has_no_tokens() -> None:
    assert read(stream()) == ([], None)


def test_one_read_gives_one_list() -> None:
    seen = Event()
    answer = stream(event(output_ids=1) + event(output_ids=[2, 3]), seen, event(output_ids=4))
    with connected(answer) as (client, _):
        tokens = ids_of(client.events(client.request(VALUES)))
        assert next(tokens) == [1, 2, 3]
        seen.set()
        assert list(tokens) == [[4]]


def test_events_of_one_read_are_one_list() -> None:
    """A reader that is slower than the engine catches up; each event is a chunk of HTTP's."""
    answer = b"".join(stream(event(output_ids=1), event(output_ids=[2, 3])))  # type: ignore[arg-type]
    with connected([answer]) as (client, _):
        assert list(ids_of(client.events(client.request(VALUES)))) == [[1, 2, 3]]


@given(st.lists(st.one_of(st.integers(0, 10**6), st.lists(st.integers(0, 10**6)))), st.data())
def test_ids_survive_any_chunking(outputs: list[Any], data: st.DataObject) -> None:
    body = b"".join(event(output_ids=ids, model_name="ü", sequence_length=1) for ids in outputs)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(body) - 1)), max_size=6)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    flat = [i for ids in outputs for i in (ids if isinstance(ids, list) else [ids])]
    assert read(stream(*filter(None, pieces))) == (flat, None)


def test_events_may_end_their_lines_with_crlf() -> None:
    pieces = [b'data: {"output_ids": 1}\r\n\r', b'\ndata: {"output_ids": 2}\r\n\r\n']
    assert read(stream(*pieces)) == ([1, 2], None)


def test_error_before_the_first_token_keeps_its_code() -> None:
    text = "in ensemble 'ensemble', E1005 InvalidArgument: top_k=-1: must not be negative"
    ids, error = read(stream(event(error=text), status="400 Bad Request"))
    assert ids == []
    assert isinstance(error, InvalidArgument)
    assert error.detail == "top_k=-1: must not be negative"


def test_error_after_tokens_ends_the_stream() -> None:
    ids, error = read(stream(event(output_ids=[1, 2]), event(error="the engine fell over")))
    assert ids == [1, 2]
    assert isinstance(error, TritonUnknownError)
    assert "the engine fell over" in str(error)


def test_tokens_in_the_same_read_as_an_error_are_kept() -> None:
    ids, error = read(stream(event(output_ids=[1, 2]) + event(error="the engine fell over")))
    assert ids == [1, 2]
    assert isinstance(error, TritonUnknownError)


def test_error_status_is_raised_without_an_event() -> None:
    ids, error = read(stream(status="500 Internal Server Error"))
    assert ids == []
    assert isinstance(error, TritonUnknownError)
    assert "500" in str(error)


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        ("400 Bad Request", b'{"error": "missing input_ids"}', TritonUnknownError, "missing inp"),
        ("400 Bad Request", b'{"error": "E1005 InvalidArgument: x"}', InvalidArgument, "x"),
        ("404 Not Found", b'{"error": "Request for unknown model"}', TritonUnknownError, "unknown"),
        ("500 Internal Server Error", b'{"error": "failed to parse"}', TritonUnknownError, "parse"),
        ("500 Internal Server Error", b"<html>oops</html>", TritonUnknownError, "500.*oops"),
        ("503 Service Unavailable", b"", TritonUnknownError, "503"),
        ("400 Bad Request", b"[1]", TritonUnknownError, "400"),
        ("400 Bad Request", b'{"detail": 1}', TritonUnknownError, "400"),
        ("400 Bad Request", b"\xff\xfe", TritonUnknownError, "400"),
    ],
)
def test_http_errors_are_coded(
    status: str, body: bytes, kind: type[CogTritonError], said: str
) -> None:
    ids, error = read([whole(body, status)])
    assert ids == []
    assert type(error) is kind
    assert re.search(said, str(error))


@pytest.mark.parametrize("payload", [b"{not json", b"nan?", b"{'a': 1}", b"\xff\xfe"])
def test_event_that_is_not_json_is_e2103(payload: bytes) -> None:
    ids, error = read(stream(event(output_ids=1), b"data: " + payload + b"\n\n"))
    assert ids == [1]
    assert isinstance(error, TritonMalformedJSON)


@pytest.mark.parametrize("payload", [b"[]", b"3", b"null", b'"x"'])
def test_event_that_is_no_object_is_e2104(payload: bytes) -> None:
    ids, error = read(stream(event(output_ids=1), b"data: " + payload + b"\n\n"))
    assert ids == [1]
    assert isinstance(error, TritonMalformedEvent)


def test_long_malformed_event_is_shortened() -> None:
    _, error = read(stream(b"data: {" + b"x" * 10**5 + b"\n\n"))
    assert isinstance(error, TritonMalformedJSON)
    assert len(str(error)) < 500


def test_stream_that_ends_inside_an_event_is_e2104() -> None:
    ids, error = read(stream(event(output_ids=1), b'data: {"output_ids": 2'))
    assert ids == [1]
    assert isinstance(error, TritonMalformedEvent)
    assert "ended inside an event" in str(error)


def test_early_close_is_e2105() -> None:
    ids, error = read([*stream(event(output_ids=1), end=False), RESET])
    assert ids == [1]
    assert isinstance(error, TritonUnavailable)


def test_reset_before_the_response_is_e2105() -> None:
    ids, error = read([RESET])
    assert ids == []
    assert isinstance(error, TritonUnavailable)


def test_response_that_is_not_http_is_e2105() -> None:
    _, error = read([b"SSH-2.0-OpenSSH_9.2\r\n\r\n", RESET])
    assert isinstance(error, TritonUnavailable)


@pytest.mark.parametrize("before", [[], [event(output_ids=1)]], ids=["at once", "after a token"])
def test_no_bytes_within_the_timeout_is_e2101(before: list[bytes]) -> None:
    answer = [*stream(*before, end=False), HANG] if before else [HANG]
    ids, error = read(answer, timeout=0.2)
    assert ids == [1] * len(before)
    assert isinstance(error, TritonTimeout)
    assert re.search(r"\b0\.2 ?s", str(error)), "how long it waited"


def test_refused_connection_is_e2105() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    assert not is_ready(url)
    client = TritonClient(url, PATIENCE_S, to_error)
    with pytest.raises(TritonUnavailable):
        next(ids_of(client.events(client.request(VALUES))))


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert read(stream(event(output_ids=3))) == ([3], None)


def test_closing_the_iterator_closes_its_connection() -> None:
    answer = [*stream(event(output_ids=1), end=False), HANG]
    with connected(answer) as (client, server):
        tokens = ids_of(client.events(client.request(VALUES)))
        assert next(tokens) == [1]
        assert not server.request().left.is_set()
        tokens.close()
        assert server.request().left.wait(PATIENCE_S)


@pytest.mark.parametrize("before", [[], [1], [1, 2]], ids=["head", "first token", "more tokens"])
def test_abort_ends_a_waiting_reader(before: list[int]) -> None:
    events = [event(output_ids=token) for token in before]
    answer = [*stream(*events, end=False), HANG] if before else [HANG]
    ids: list[int] = []
    all_read = Event()

    def read_on() -> None:
        for new in ids_of(client.events(request)):
            ids.extend(new)
            if ids == before:
                all_read.set()

    with ThreadPoolExecutor() as pool, connected(answer) as (client, server):
        request = client.request(VALUES)
        reader = pool.submit(read_on)
        assert server.request().json == VALUES
        assert not before or all_read.wait(PATIENCE_S)
        assert not reader.done()
        request.abort()
        assert isinstance(reader.exception(PATIENCE_S), TritonUnavailable)
        assert server.request().left.wait(PATIENCE_S)
    assert ids == before


def test_abort_between_two_reads_ends_the_stream() -> None:
    answer = [*stream(event(output_ids=1), end=False), HANG]
    with connected(answer) as (client, server):
        request = client.request(VALUES)
        with closing(ids_of(client.events(request))) as tokens:
            assert next(tokens) == [1]
            request.abort()
            assert server.request().left.wait(PATIENCE_S)
            with pytest.raises(TritonUnavailable):
                next(tokens)


def test_aborted_request_is_not_sent() -> None:
    with connected(stream(event(output_ids=1))) as (client, server):
        request = client.request(VALUES, "hung up")
        request.abort()
        with pytest.raises(TritonUnavailable):
            next(ids_of(client.events(request)))
        # Connections are accepted in order, so what came before this one has been read.
        assert list(ids_of(client.events(client.request(VALUES, "next")))) == [[1]]
    assert [request.json["id"] for request in server.requests] == ["next"]


def test_abort_twice_or_after_the_end_does_nothing() -> None:
    with connected(stream(event(output_ids=1))) as (client, _):
        request = client.request(VALUES)
        assert list(ids_of(client.events(request))) == [[1]]
        request.abort()
        request.abort()


def test_abort_leaves_other_requests_alone() -> None:
    seen = Event()
    answer = stream(event(output_ids=1), seen, event(output_ids=2))
    with connected(answer) as (client, _):
        requests = [client.request(VALUES) for _ in range(3)]
        readers = [ids_of(client.events(request)) for request in requests]
        assert [next(tokens) for tokens in readers] == [[1]] * 3
        requests[1].abort()
        seen.set()
        assert list(readers[0]) == list(readers[2]) == [[2]]
        readers[1].close()


def test_stop_sends_the_request_id() -> None:
    with connected(stream()) as (client, server):
        client.stop("7-1")
    (request,) = server.requests
    assert request.json["stop"] is True
    assert request.json["id"] == "7-1"


def test_failed_stop_raises() -> None:
    with connected([RESET]) as (client, _), pytest.raises(TritonUnavailable):
        client.stop("7-1")


@pytest.mark.parametrize(("status", "ready"), [("200 OK", True), ("400 Bad Request", False)])
def test_readiness_follows_triton(status: str, ready: bool) -> None:
    with serving([whole(b"", status)]) as server:
        assert is_ready(server.url) is ready
    assert server.requests[0].path == "/v2/health/ready"


def test_client_is_thread_safe() -> None:
    count = 100
    all_here = Event()
    answer = stream(event(output_ids=1), all_here, event(output_ids=2))
    with ThreadPoolExecutor(count) as pool, connected(answer) as (client, server):

        def one(_: int) -> list[int]:
            return [token for ids in ids_of(client.events(client.request(VALUES))) for token in ids]

        results = pool.map(one, range(count))
        server.request(count - 1)
        all_here.set()
        assert list(results) == [[1, 2]] * count
