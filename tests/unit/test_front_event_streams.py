"""Ends of event streams through the front: a code whatever died behind it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from small_front import (
    asked,
    decided,
    gates,
    read_request,
    route_to,
)

from cog_triton.front.cog_gate import CodedEnd
from cog_triton.front.message import Forward

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CUT = b'data: {"error":"E2105"}\n\n'


def chunk(event: bytes) -> bytes:
    return b"%X\r\n%b\r\n" % (len(event), event)


EVENT = b'event: output\ndata: {"chunk":" the","index":82}\n\n'
TOKEN = chunk(EVENT)


def failed(reason: str, output: str = "") -> bytes:
    """What coglet ends a failed prediction's stream with."""
    data = {"error": reason, "id": "x", "output": [output], "status": "failed"}
    return f"event: completed\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def dechunked(data: bytes) -> tuple[bytes, bool]:
    """The body, and whether it came to its end."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        if size == b"0":
            return body, data == b"\r\n"
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body, False


def edited(*pieces: bytes) -> bytes:
    edit = CodedEnd()
    return b"".join(map(edit, pieces)) + edit.end()


CODE = 'E1002 PromptTooLong: "no"'
DEATHS = ("Worker crashed", "Failed to send request: Broken pipe (32)")
FIRST = ("", "Generator iteration error: A: ", "Async prediction failed: A: ")


@pytest.mark.parametrize(
    ("reason", "seen"),
    [
        *((f"Prediction failed: {words}{CODE}", CODE) for words in FIRST),
        *((d, f"E2105 TritonUnavailable: Cog's worker has died: {d}; try again") for d in DEATHS),
        *((as_it_is, as_it_is) for as_it_is in (CODE, "Worker", "Prediction failed: A: b")),
    ],
)
@pytest.mark.parametrize("output", ["", "x" * 100_000])
def test_a_failure_begins_with_its_code_wherever_reads_cut_the_stream(
    reason: str, seen: str, output: str
) -> None:
    data, expected = EVENT * 3 + failed(reason, output), EVENT * 3 + failed(seen, output)
    for at in (*range(len(EVENT) * 2, len(EVENT) * 3 + 300), len(data) - 1):
        assert edited(data[:at], data[at:]) == expected
    assert edited(*(data[i : i + 1] for i in range(len(data)))) == expected


def test_only_the_start_of_an_event_is_held_back() -> None:
    said = b'event: output\ndata: {"chunk":"event: completed\\ndata: {\\"error\\":\\"W"}\n\n'
    long = b"data: " + b"x" * 300 + b"\n"
    edit = CodedEnd()
    for piece in (EVENT, EVENT + EVENT, said, b": ping\n\n", long + b"\n"):
        assert edit(piece) == piece
    assert (edit(EVENT + EVENT[:9]), edit(EVENT[9:])) == (EVENT, EVENT)
    # The end of a long event waits for nothing that comes after it.
    assert edit(long) + edit(b"\n") == long + b"\n"
    assert (edit(b"x" * 255), edit(b"x"), edit(b"yz"), edit.end()) == (b"", b"x" * 256, b"", b"yz")


def through(*pieces: bytes) -> bytes:
    """What a client gets when these come, one after the other, and then the end."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        writer.close()

    return asked(handler, GET, edit=CodedEnd(), cut=CUT).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "pieces",
    [[HEAD + TOKEN], [HEAD, TOKEN], [HEAD], [HEAD + TOKEN, TOKEN[:20]], [HEAD, TOKEN + b"2"]],
)
def test_a_stream_that_breaks_off_ends_with_an_error(pieces: list[bytes]) -> None:
    body, whole = dechunked(through(*pieces))
    assert whole
    assert body.endswith(CUT)
    assert body.count(b"the") == sum(piece.count(TOKEN) for piece in pieces)


@pytest.mark.parametrize(("name", "more"), [("cog", {"status": "failed"}), ("triton", {})])
def test_every_port_says_so_in_its_own_shape(name: str, more: Any) -> None:
    forward = decided(gates(route_to())[name], "GET", {"cog": "/", "triton": "/v2"}[name])
    assert isinstance(forward, Forward)
    first, _, data = forward.cut.rpartition(b"data: ")
    assert {**(error := json.loads(data)), **more} == error
    assert error["error"].startswith("E2105 TritonUnavailable: ")
    assert (first, data[-3:]) == (b"event: completed\n" if more else b"", b"}\n\n")
