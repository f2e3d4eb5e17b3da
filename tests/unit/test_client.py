"""The client against a real HTTP server that answers well, badly, and not at all."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import HANG, RESET, Part, ScriptedServer, event, serving, stream, whole

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

Result = TypeVar("Result")
VALUES = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 9, "streaming": True}


def to_error(text: str) -> CogTritonError:
    return errors.from_text(text) or TritonUnknownError(text)


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    async def limited() -> Result:
        return await asyncio.wait_for(coroutine, 20)

    return asyncio.run(limited())


@asynccontextmanager
async def connected(
    answer: Sequence[Part], timeout: float = 10
) -> AsyncIterator[tuple[TritonClient, ScriptedServer]]:
    async with serving(answer) as server, TritonClient(server.url, timeout, to_error) as client:
        yield client, server


def read(answer: Sequence[Part], timeout: float = 10) -> tuple[list[int], CogTritonError | None]:
    """All ids that arrive, and the error that ends the stream."""

    async def main() -> tuple[list[int], CogTritonError | None]:
        ids: list[int] = []
        async with connected(answer, timeout) as (client, _):
            try:
                async for new in client.stream(VALUES):
                    assert new
                    ids += new
            except CogTritonError as error:
                return ids, error
        return ids, None

    return run(main())


def test_the_request_is_what_was_asked_for() -> None:
    async def main() -> None:
        async with connected(stream(event(output_ids=7))) as (client, server):
            assert [ids async for ids in client.stream(VALUES, "12-1")] == [[7]]
            assert [ids async for ids in client.stream(VALUES)] == [[7]]
            first, second = server.requests
            assert first.path == "/v2/models/tensorrt_llm/generate_stream"
            assert first.json == {**VALUES, "id": "12-1"}
            assert second.json == VALUES

    run(main())


def test_scalars_and_lists_of_ids() -> None:
    answer = stream(event(output_ids=5), event(output_ids=[6, 7]), event(output_ids=[]))
    assert read(answer) == ([5, 6, 7], None)


def test_a_stream_without_events_is_a_generation_without_tokens() -> None:
    assert read(stream()) == ([], None)


def test_one_read_gives_one_list() -> None:
    async def main() -> list[list[int]]:
        answer = stream(event(output_ids=1) + event(output_ids=[2, 3]), event(output_ids=4))
        async with connected(answer) as (client, _):
            return [ids async for ids in client.stream(VALUES)]

    assert run(main()) == [[1, 2, 3], [4]]


@settings(deadline=None, max_examples=25)
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


def test_an_error_before_the_first_token_keeps_its_code() -> None:
    text = "in ensemble 'ensemble', E1005 InvalidArgument: top_k=-1: must not be negative"
    ids, error = read(stream(event(error=text), status="400 Bad Request"))
    assert ids == []
    assert isinstance(error, InvalidArgument)
    assert error.detail == "top_k=-1: must not be negative"


def test_an_error_after_tokens_ends_the_stream() -> None:
    ids, error = read(stream(event(output_ids=[1, 2]), event(error="the engine fell over")))
    assert ids == [1, 2]
    assert isinstance(error, TritonUnknownError)
    assert "the engine fell over" in str(error)


def test_tokens_that_arrive_together_with_an_error_are_not_lost() -> None:
    ids, error = read(stream(event(output_ids=[1, 2]) + event(error="the engine fell over")))
    assert ids == [1, 2]
    assert isinstance(error, TritonUnknownError)


def test_an_error_status_is_an_error_even_without_an_event() -> None:
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
def test_http_errors(status: str, body: bytes, kind: type[CogTritonError], said: str) -> None:
    ids, error = read([whole(body, status)])
    assert ids == []
    assert type(error) is kind
    assert re.search(said, str(error))


@pytest.mark.parametrize("payload", [b"{not json", b"nan?", b"{'a': 1}", b"\xff\xfe"])
def test_events_that_are_not_json(payload: bytes) -> None:
    ids, error = read(stream(event(output_ids=1), b"data: " + payload + b"\n\n"))
    assert ids == [1]
    assert isinstance(error, TritonMalformedJSON)


@pytest.mark.parametrize("payload", [b"[]", b"3", b"null", b'"x"', b"{}", b'{"output_id": 3}'])
def test_events_without_output_ids(payload: bytes) -> None:
    ids, error = read(stream(event(output_ids=1), b"data: " + payload + b"\n\n"))
    assert ids == [1]
    assert isinstance(error, TritonMalformedEvent)


@pytest.mark.parametrize("ids", ["null", '"12"', "1.5", "true", "[1.5]", '["a"]', "[[1]]", "{}"])
def test_output_ids_that_are_no_token_ids(ids: str) -> None:
    got, error = read(stream(b'data: {"output_ids": %b}\n\n' % ids.encode()))
    assert got == []
    assert isinstance(error, TritonMalformedEvent)


def test_a_long_malformed_event_is_not_quoted_whole() -> None:
    _, error = read(stream(b"data: {" + b"x" * 10**5 + b"\n\n"))
    assert isinstance(error, TritonMalformedJSON)
    assert len(str(error)) < 500


def test_a_stream_that_ends_inside_an_event() -> None:
    ids, error = read(stream(event(output_ids=1), b'data: {"output_ids": 2'))
    assert ids == [1]
    assert isinstance(error, TritonMalformedEvent)
    assert "ended inside an event" in str(error)


def test_a_connection_that_closes_early() -> None:
    ids, error = read([*stream(event(output_ids=1), end=False), RESET])
    assert ids == [1]
    assert isinstance(error, TritonUnavailable)


def test_a_connection_that_is_reset_before_the_answer() -> None:
    ids, error = read([RESET])
    assert ids == []
    assert isinstance(error, TritonUnavailable)


def test_an_answer_that_is_not_http() -> None:
    _, error = read([b"SSH-2.0-OpenSSH_9.2\r\n\r\n", RESET])
    assert isinstance(error, TritonUnavailable)


@pytest.mark.parametrize("before", [[], [event(output_ids=1)]], ids=["at once", "after a token"])
def test_silence_is_a_timeout(before: list[bytes]) -> None:
    answer = [*stream(*before, end=False), HANG] if before else [HANG]
    ids, error = read(answer, timeout=0.2)
    assert ids == [1] * len(before)
    assert isinstance(error, TritonTimeout)
    assert re.search(r"\b0\.2 ?s", str(error)), "how long it waited"


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    async def main() -> None:
        async with TritonClient(f"http://127.0.0.1:{port}", 5, to_error) as client:
            assert not await client.is_ready()
            with pytest.raises(TritonUnavailable):
                async for _ in client.stream(VALUES):
                    pass

    run(main())


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert read(stream(event(output_ids=3))) == ([3], None)


def test_closing_a_stream_closes_its_connection() -> None:
    async def main() -> None:
        answer = [*stream(event(output_ids=1), end=False), HANG]
        async with connected(answer) as (client, server):
            async with aclosing(client.stream(VALUES)) as tokens:
                async for _ in tokens:
                    break
            await server.requests[0].left.wait()

    run(main())


def test_cancelling_a_stream_closes_its_connection() -> None:
    async def main() -> None:
        async with connected([HANG]) as (client, server):
            task = asyncio.ensure_future(client.stream(VALUES).__anext__())
            while not server.requests:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await server.requests[0].left.wait()

    run(main())


def test_stop_names_the_request() -> None:
    async def main() -> None:
        async with connected(stream()) as (client, server):
            await client.stop("7-1")
            (request,) = server.requests
            assert request.json["stop"] is True
            assert request.json["id"] == "7-1"

    run(main())


@pytest.mark.parametrize(("status", "ready"), [("200 OK", True), ("400 Bad Request", False)])
def test_readiness(status: str, ready: bool) -> None:
    async def main() -> bool:
        async with connected([whole(b"", status)]) as (client, server):
            result = await client.is_ready()
            assert server.requests[0].path == "/v2/health/ready"
            return result

    assert run(main()) is ready


def test_more_streams_than_kept_connections() -> None:
    async def main() -> None:
        async with connected(stream(event(output_ids=1), event(output_ids=2))) as (client, _):

            async def one() -> list[int]:
                return [i async for ids in client.stream(VALUES) for i in ids]

            assert await asyncio.gather(*(one() for _ in range(300))) == [[1, 2]] * 300

    run(main())
