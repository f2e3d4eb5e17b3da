"""Requests to Triton, on a gRPC stream and by generate_stream: good and broken answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest
from loop_thread import OnLoop, call
from scripted_server import (
    HANG,
    PATIENCE_S,
    RESET,
    Part,
    ScriptedServer,
    serving,
    stream,
    wait_until,
    whole,
)
from scripted_server import (
    event as sse,
)
from scripted_triton import Answer, ScriptedTriton, event, to_error

from cog_triton.engines.generate_stream import GenerateStream
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import ERROR, STOP, StepItem
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.system.ports import free_ports
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton.request_streams import RequestStreams


@contextmanager
def connected(
    answer: Answer, timeout: float = 2 * PATIENCE_S
) -> Iterator[tuple[RequestStreams, ScriptedTriton]]:
    with ScriptedTriton(answer) as triton, triton.connected(timeout) as streams:
        yield streams, triton


class Running:
    """A submitted request and the items it got; offsets are checked as they come."""

    def __init__(self, streams: RequestStreams, *, log_probs: bool = False, **inputs: Any) -> None:
        self.items: list[StepItem] = []
        self.ended = Event()
        sampling = SamplingParams(max_tokens=9)
        request = EngineRequest(input_ids=[1, 2], sampling=sampling, return_log_probs=log_probs)
        self.submission = OnLoop(call(streams.submit, request, inputs, self._put))

    def _put(self, item: StepItem) -> None:
        assert not self.ended.is_set(), "an item after the end"
        assert item.error or item.offset == len(self.ids)
        self.items.append(item)
        if item.end:
            self.ended.set()

    @property
    def ids(self) -> list[int]:
        return [token for item in self.items for token in item.ids]

    def wait(self) -> tuple[list[int], str | None]:
        """All ids, and the error that ended it."""
        assert self.ended.wait(4 * PATIENCE_S)
        assert self.items[-1].end in (STOP, ERROR)
        return self.ids, self.items[-1].error


def test_request_has_values_and_an_id_of_its_own() -> None:
    with connected([event(output_ids=7)]) as (streams, triton):
        assert Running(streams, tps=3).wait() == ([7], None)
        assert Running(streams).wait() == ([7], None)
    first, second = triton.requests
    assert first.model == "tensorrt_llm"
    assert (first.values["input_ids"], first.values["tps"]) == ([1, 2], 3)
    assert "tps" not in second.values
    assert first.id != second.id


@pytest.mark.parametrize(
    ("excluded", "answer"), [(True, [1, 2, 7]), (False, [1, 2, 1, 2, 7]), (False, [1, 2, 7])]
)
def test_a_whole_answer_has_neither_prompt_nor_padding(excluded: bool, answer: list[int]) -> None:
    inputs = {"streaming": False, "exclude_input_in_output": excluded}
    whole = event(output_ids=[*answer, 0, 0], sequence_length=len(answer))
    with connected([whole]) as (streams, _):
        expected = answer if excluded else answer[2:]
        assert Running(streams, **inputs).wait() == (expected, None)


def test_log_probs_come_with_their_tokens() -> None:
    answer = [
        event(output_ids=[1, 2], output_log_probs=[-1.0, -2]),
        event(output_ids=3, output_log_probs=-3.5),
        event(output_ids=4, output_log_probs=[-1.0, -2.0, -3.5, -4.0]),  # repeats earlier ones
    ]
    with connected(answer) as (streams, _):
        one = Running(streams, log_probs=True)
        assert one.wait() == ([1, 2, 3, 4], None)
    assert [value for item in one.items for value in item.log_probs] == [-1.0, -2, -3.5, -4.0]
    assert {item.width for item in one.items if item.ids} == {1}


WHOLE, PROBS = {"streaming": False}, {"log_probs": True}
FEWER = event(output_ids=[1, 2], output_log_probs=[-1.0])
NONE = event(output_ids=1, output_log_probs=[])


@pytest.mark.parametrize(
    ("answer", "inputs", "ids", "said"),
    [
        ([event(error="E1005 InvalidArgument: k")], {}, [], "E1005 .*: k"),
        ([event(error="E1005 InvalidArgument: k")], WHOLE, [], "E1005 .*: k"),
        ([event(output_ids=[1, 2]), event(error="it fell")], {}, [1, 2], "E2100 .*fell"),
        ([event(sequence_length=1), HANG], {}, [], "E2104 .*output_ids: none"),
        ([event(sequence_length=1)], WHOLE, [], "E2104 .*output_ids: none"),
        ([event(output_ids=1), event(output_ids=1.5), HANG], {}, [1], "E2104 .*output_ids: FP32"),
        ([NONE, HANG], PROBS, [], "E2104 .*output_log_probs: INT32"),
        ([FEWER, HANG], PROBS, [], "E2104 .*no output_log_probs for its tokens"),
        ([event(output_ids=1), RESET], {}, [1], "E2105 .*try again"),
        ([RESET], WHOLE, [], "E2105 .*try again"),
    ],
)
def test_errors_come_after_the_tokens_before_them(
    answer: list[Part], inputs: dict[str, Any], ids: list[int], said: str
) -> None:
    with connected(answer) as (streams, triton):
        assert_fails(Running(streams, **inputs), ids, said)
        if HANG in answer:
            assert triton.request().left.wait(PATIENCE_S), "it was stopped"
        triton.answer_with([event(output_ids=8)])
        assert Running(streams).wait() == ([8], None), "on the same stream, or a new one"


def assert_fails(one: Running, ids: list[int], said: str) -> None:
    found, error = one.wait()
    assert found == ids
    assert re.match(said, str(error))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("nonesuch", 1, "nonesuch: this engine does not support it"),
        ("tps", "x", "tps: not of type INT32"),
        ("tps", 2**31, "tps: not of type INT32"),
        ("temperature", 1e39, "temperature: not of type FP32"),
        ("lora_name", "\ud800", "lora_name: not of type BYTES"),
    ],
)
def test_values_that_no_input_takes_are_e1005(name: str, value: object, said: str) -> None:
    with connected([]) as (streams, triton):
        with pytest.raises(InvalidArgument, match=said):
            Running(streams, **{name: value})
        assert Running(streams).wait() == ([], None)
    assert len(triton.requests) == 1


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_within_the_timeout_is_e2101(tokens: int) -> None:
    with connected([*[event(output_ids=1)] * tokens, HANG], 0.3) as (streams, triton):
        said = r"E2101 .*\b0\.3 s \(TRITON_TIMEOUT\)"
        assert_fails(Running(streams), [1] * tokens, said)
        assert triton.request().left.wait(PATIENCE_S), "it was stopped"


@pytest.mark.parametrize("tokens", [0, 1])
def test_cancel_stops_a_request_by_its_id(tokens: int) -> None:
    with connected([*[event(output_ids=1)] * tokens, HANG]) as (streams, triton):
        one, two = Running(streams), Running(streams)
        wait_until(lambda: len(triton.requests) == 2 and one.ids == two.ids == [1] * tokens)
        (first,) = [each for each in triton.requests if each.id == one.submission._id]
        one.submission.cancel()
        one.submission.cancel()
        assert first.left.wait(PATIENCE_S)
        assert sum(request.left.is_set() for request in triton.requests) == 1
        assert len(one.items) == tokens
        assert not two.ended.is_set()


Events = list[dict[str, Any]]


@contextmanager
def listening(answer: Sequence[Part]) -> Iterator[tuple[GenerateStream, ScriptedServer]]:
    with pytest.MonkeyPatch.context() as patch, serving(answer) as server:
        patch.setenv("TRITON_HTTP_PORT", str(urlsplit(server.url).port))
        yield GenerateStream("tensorrt_llm", "12-1", {"input_ids": [1]}, to_error), server


def read(answer: Sequence[Part]) -> tuple[Events, CogTritonError | None]:
    """All events that arrive, and the error that ends the stream."""
    events: Events = []
    with listening(answer) as (request, _):
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
    with listening(stream(sse(output_ids=7), sse(output_ids=[8, 9]))) as (request, server):
        assert list(request.events()) == ids(7, [8, 9])
    (arrived,) = server.requests
    assert arrived.path == "/v2/models/tensorrt_llm/generate_stream"
    assert arrived.json == {"input_ids": [1], "id": "12-1"}
    assert read(stream()) == ([], None)


ENSEMBLE = "in ensemble 'ensemble', E1005 InvalidArgument: top_k=-1: must not be negative"


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (stream(sse(error=ENSEMBLE), status="400 Bad Request"),
         InvalidArgument, "InvalidArgument: top_k=-1: must not be negative$"),
        (stream(sse(error="the engine fell over")), TritonUnknownError, "fell over"),
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


def test_no_listener_is_e2105_that_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.delenv("TRITON_HOST", raising=False)
    monkeypatch.setenv("TRITON_HTTP_PORT", str(port))
    with pytest.raises(TritonUnavailable, match=f"127.0.0.1:{port} .TRITON_HOST"):
        list(GenerateStream("m", "id", {}, to_error).events())
