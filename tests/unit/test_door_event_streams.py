"""Ends of event streams through the front door: a code whatever died behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from small_door import (
    PassGate,
    answering,
    gates,
    on_loop,
    opened,
    read_request,
    route_to,
    run,
    served,
)

from cog_triton.door.cog_gate import CodedEnd
from cog_triton.door.cog_state import CogState
from cog_triton.door.message import Answer, Forward, Request
from cog_triton.errors import TritonUnavailable

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CUT = b'data: {"error":"E2105"}\n\n'


def chunk(event: bytes) -> bytes:
    return b"%X\r\n%b\r\n" % (len(event), event)


TOKEN = chunk(b'event: output\ndata: {"chunk":" the","index":82}\n\n')
END = b"0\r\n\r\n"


def failed(reason: str, output: str = "") -> bytes:
    """What coglet ends a failed prediction's stream with."""
    data = {"error": reason, "id": "x", "output": [output], "status": "failed"}
    text = json.dumps(data, separators=(",", ":"))
    return chunk(f"event: completed\ndata: {text}\n\n".encode())


def dechunked(data: bytes) -> tuple[bytes, bool]:
    """The body, and whether it came to its end."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        if size == b"0":
            return body, data == b"\r\n"
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body, False


def edited(pieces: Iterable[bytes]) -> bytes:
    edit = CodedEnd()
    return b"".join(edit(piece) for piece in pieces)


@pytest.mark.parametrize("reason", ["Worker crashed", "Failed to send request: Broken pipe (32)"])
@pytest.mark.parametrize("output", ["", "x" * 100_000])
def test_a_workers_death_gets_its_code_wherever_reads_cut_the_stream(
    reason: str, output: str
) -> None:
    data = TOKEN * 3 + failed(reason, output) + END
    for at in range(len(TOKEN) * 2, len(TOKEN) * 3 + 300):
        body, whole = dechunked(edited([data[:at], data[at:]]))
        assert whole
        event = json.loads(body.rpartition(b"data: ")[2])
        assert event["error"] == (
            f"E2105 TritonUnavailable: Cog's worker has died: {reason}; try again"
        )
        assert (event["status"], event["output"]) == ("failed", [output])
    assert edited(data[i : i + 1] for i in range(len(data))) == edited([data])


@pytest.mark.parametrize(
    "words",
    [
        "Prediction failed: ",
        "Prediction failed: Generator iteration error: PromptTooLong: ",
        "Prediction failed: Async prediction failed: PromptTooLong: ",
    ],
)
@pytest.mark.parametrize("output", ["", "x" * 100_000])
def test_the_code_of_a_failure_comes_first_wherever_reads_cut_the_stream(
    words: str, output: str
) -> None:
    said = 'E1002 PromptTooLong: "no"'
    data = TOKEN * 3 + failed(words + said, output) + END
    for at in range(len(TOKEN) * 2, len(TOKEN) * 3 + 300):
        body, whole = dechunked(edited([data[:at], data[at:]]))
        assert whole
        event = json.loads(body.rpartition(b"data: ")[2])
        assert (event["error"], event["output"]) == (said, [output])
    assert edited(data[i : i + 1] for i in range(len(data))) == edited([data])


@pytest.mark.parametrize(
    "last", [failed("E1002 PromptTooLong: no"), failed("Worker"), chunk(b"event: completed\n\n")]
)
def test_other_ends_stay_as_they_are(last: bytes) -> None:
    data = TOKEN + last + END
    assert edited([data]) == data
    assert edited(data[i : i + 1] for i in range(len(data))) == data


def test_tokens_that_have_come_whole_are_never_held_back() -> None:
    said = chunk(b'event: output\ndata: {"chunk":"event: completed\\ndata: {\\"error\\":\\"W"}\n\n')
    edit = CodedEnd()
    for piece in (TOKEN, TOKEN + TOKEN, said, TOKEN + END):
        assert edit(piece) == piece


class Cutting(PassGate):
    async def decide(self, request: Request) -> Forward | Answer:
        return Forward(self.connections, self.port, "GET", b"/", [], b"", edit=CodedEnd(), cut=CUT)


def through(*pieces: bytes) -> bytes:
    """What a client gets when these come, one after the other, and then the end."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        writer.close()

    async def main() -> bytes:
        async with served(handler) as plain, opened(Cutting(plain.gate.port)) as door:
            return await door.ask(GET)

    return run(main()).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "pieces",
    [[HEAD + TOKEN], [HEAD, TOKEN], [HEAD], [HEAD + TOKEN, TOKEN[:20]], [HEAD, TOKEN + b"2"]],
)
def test_a_stream_that_breaks_off_ends_with_an_error(pieces: list[bytes]) -> None:
    body, whole = dechunked(through(*pieces))
    assert whole
    assert body.endswith(CUT)
    assert body.count(b"the") == sum(piece.count(TOKEN) for piece in pieces)


def test_a_stream_that_ended_gets_nothing_more() -> None:
    assert through(HEAD + TOKEN, END) == TOKEN + END


def test_what_breaks_off_within_an_event_stays_broken() -> None:
    long = chunk(b"data: " + b"x" * 1000 + b"\n\n")
    assert not dechunked(through(HEAD + TOKEN, long[:500]))[1]
    other = HEAD.replace(b"text/event-stream", b"application/json")
    assert not dechunked(through(other, TOKEN))[1]


@pytest.mark.parametrize(
    ("name", "path", "more"),
    [
        ("cog", b"/", {"status": "failed"}),
        ("openai", b"/v1/models", None),
        ("triton", b"/v2", None),
    ],
)
def test_every_port_says_so_in_its_own_shape(name: str, path: bytes, more: Any) -> None:
    gate = gates(route_to())[name]
    forward = run(gate.decide(Request("GET", path, [(b"host", b"localhost")], b"")))
    assert isinstance(forward, Forward)
    first, _, data = forward.cut.rpartition(b"data: ")
    error = json.loads(data)
    text = error["error"]["message"] if isinstance(error["error"], dict) else error["error"]
    assert text.startswith("E2105 TritonUnavailable: ")
    assert data.endswith(b"}\n\n")
    assert first == (b"event: completed\n" if more else b"")
    assert {**error, **(more or {})} == error


@on_loop
async def test_a_client_that_was_told_ready_is_served_at_once() -> None:
    """The door reads Cog's state only so often; a prediction may come before it has read READY."""

    body = b'{"status":"READY"}'
    ready = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with served(answering(ready)) as plain:
        await CogState(plain.gate.port).require_serving()
    with pytest.raises(TritonUnavailable):
        await CogState(plain.gate.port).require_serving()
