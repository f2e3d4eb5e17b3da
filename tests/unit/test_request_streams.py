"""Response streams a request, against a real HTTP server: good, malformed and missing responses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import (
    HANG,
    PATIENCE_S,
    RESET,
    Answer,
    Part,
    Request,
    ScriptedServer,
    event,
    serving,
    stream,
    wait_until,
    whole,
)

from cog_triton.engines import tensor_contract
from cog_triton.engines.generate_stream import to_error
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import ERROR, STOP, StepItem
from cog_triton.errors import TritonUnavailable
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton.request_streams import RequestStreams
from cog_triton.triton.token_transport import Submission

BROKEN_STREAM = [*stream(event(output_ids=1), end=False), RESET]


@contextmanager
def connected(
    answer: Answer, timeout: float = 2 * PATIENCE_S
) -> Iterator[tuple[RequestStreams, ScriptedServer]]:
    with serving(answer) as server:
        streams = RequestStreams(server.url, timeout, to_error, tensor_contract.encode_request)
        streams.open()
        try:
            yield streams, server
        finally:
            streams.disconnect()
            streams.close()


class Running:
    """A submitted request and the items it got; offsets are checked as they come."""

    def __init__(self, streams: RequestStreams, *, log_probs: bool = False, **inputs: Any) -> None:
        self.items: list[StepItem] = []
        self.ended = Event()
        request = EngineRequest(
            input_ids=[1, 2], sampling=SamplingParams(max_tokens=9), return_log_probs=log_probs
        )
        self.submission: Submission = streams.submit(request, inputs, self._put)

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


def read(answer: Answer, timeout: float = 2 * PATIENCE_S) -> tuple[list[int], str | None]:
    with connected(answer, timeout) as (streams, _):
        return Running(streams).wait()


def test_request_has_path_values_and_an_id_of_its_own() -> None:
    with connected(stream(event(output_ids=7))) as (streams, server):
        assert Running(streams, tps=3).wait() == ([7], None)
        assert Running(streams).wait() == ([7], None)
    first, second = server.requests
    assert first.path == "/v2/models/tensorrt_llm/generate_stream"
    assert (first.json["input_ids"], first.json["tps"]) == ([1, 2], 3)
    assert "tps" not in second.json
    assert first.json["id"] != second.json["id"]


def test_output_ids_may_be_a_scalar_or_a_list() -> None:
    answer = stream(event(output_ids=5), event(output_ids=[6, 7]), event(output_ids=[]))
    assert read(answer) == ([5, 6, 7], None)
    assert read(stream()) == ([], None)


@pytest.mark.parametrize(
    ("excluded", "answer"), [(True, [1, 2, 7]), (False, [1, 2, 1, 2, 7]), (False, [1, 2, 7])]
)
def test_a_whole_answer_has_neither_prompt_nor_padding(excluded: bool, answer: list[int]) -> None:
    inputs = {"streaming": False, "exclude_input_in_output": excluded}
    payload = event(output_ids=[*answer, 0, 0], sequence_length=len(answer))
    with connected(stream(payload)) as (streams, _):
        expected = answer if excluded else answer[2:]
        assert Running(streams, **inputs).wait() == (expected, None)


def test_a_whole_answer_that_nobody_waits_for_is_stopped_by_its_id() -> None:
    def answer(request: Any) -> Any:
        return stream() if "stop" in request.json else [HANG]

    with connected(answer) as (streams, server):
        one = Running(streams, streaming=False)
        server.request()
        one.submission.cancel()
        stop = server.request(1)
        assert (stop.json["stop"], stop.json["streaming"]) == (True, False)
        assert stop.json["id"] == server.requests[0].json["id"]


def test_one_read_gives_one_item() -> None:
    seen = Event()
    answer = stream(event(output_ids=1) + event(output_ids=[2, 3]), seen, event(output_ids=4))
    with connected(answer) as (streams, _):
        one = Running(streams)
        wait_until(lambda: one.items)
        assert one.items == [StepItem(0, 0, 0, [1, 2, 3], [])]
        seen.set()
        assert one.wait() == ([1, 2, 3, 4], None)
    assert streams.last_token_at > 0


@given(st.lists(st.one_of(st.integers(0, 10**6), st.lists(st.integers(0, 10**6)))), st.data())
def test_ids_survive_any_chunking(outputs: list[Any], data: st.DataObject) -> None:
    body = b"".join(event(output_ids=ids, model_name="ü", sequence_length=1) for ids in outputs)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(body) - 1)), max_size=6)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    flat = [i for ids in outputs for i in (ids if isinstance(ids, list) else [ids])]
    assert read(stream(*filter(None, pieces))) == (flat, None)


def test_log_probs_come_with_their_tokens() -> None:
    answer = stream(
        event(output_ids=[1, 2], output_log_probs=[-1.0, -2]),
        event(output_ids=3, output_log_probs=-3.5),
        event(output_ids=4, output_log_probs=[-1.0, -2.0, -3.5, -4.0]),  # repeats earlier ones
    )
    with connected(answer) as (streams, _):
        one = Running(streams, log_probs=True)
        assert one.wait() == ([1, 2, 3, 4], None)
    assert [value for item in one.items for value in item.log_probs] == [-1.0, -2, -3.5, -4.0]
    assert {item.width for item in one.items if item.ids} == {1}


@pytest.mark.parametrize("values", [{}, {"output_log_probs": [-1.0]}, {"output_log_probs": "x"}])
def test_missing_log_probs_are_e2104(values: dict[str, Any]) -> None:
    with connected(stream(event(output_ids=[1, 2], **values))) as (streams, _):
        ids, error = Running(streams, log_probs=True).wait()
    assert ids == []
    assert str(error).startswith("E2104")
    assert "no output_log_probs for its tokens" in str(error)


@pytest.mark.parametrize(
    ("answer", "ids", "said"),
    [
        (stream(event(error="E1005 InvalidArgument: k"), status="400 Bad"), [], "E1005 .*: k"),
        (stream(event(output_ids=[1, 2]), event(error="it fell over")), [1, 2], "E2100 .*fell"),
        (stream(event(output_ids=[1, 2]) + event(error="it fell over")), [1, 2], "E2100 "),
        (stream(event(error="it fell over") + event(output_ids=[1, 2])), [], "E2100 "),
        (stream(status="500 Internal Server Error"), [], "E2100 .*500"),
        ([whole(b'{"error": "missing input_ids"}', "400 Bad Request")], [], "E2100 .*missing inp"),
        (stream(event(output_ids=1), b"data: {not json\n\n"), [1], "E2103 "),
        (stream(event(output_ids=1), b"data: {}\n\n"), [1], "E2104 .*no output_ids"),
        (stream(event(output_ids=1), b'data: {"output_ids": 2'), [1], "E2104 .*inside an event"),
        *((stream(event(output_ids=ids)), [], "E2104 ") for ids in (None, 1.5, True, ["a"], [[1]])),
        ([RESET], [], "E2105 .*try again"),
        (BROKEN_STREAM, [1], "E2105 .*try again"),
        ([b"SSH-2.0-x\r\n\r\n", RESET], [], "E2105 .*try again"),
    ],
)
def test_errors_come_after_the_tokens_before_them(
    answer: list[Part], ids: list[int], said: str
) -> None:
    found, error = read(answer)
    assert found == ids
    assert re.match(said, str(error))


@pytest.mark.parametrize("before", [[], [event(output_ids=1)]], ids=["at once", "after a token"])
def test_no_bytes_within_the_timeout_is_e2101(before: list[bytes]) -> None:
    with connected([*(stream(*before, end=False) if before else []), HANG], 0.3) as (streams, it):
        ids, error = Running(streams).wait()
        assert it.request().left.wait(PATIENCE_S)
    assert ids == [1] * len(before)
    assert re.match(r"E2101 .*\b0\.3 s \(TRITON_TIMEOUT\)", str(error))


def test_cancel_before_a_token_stops_by_id_and_closes() -> None:
    def answer(request: Request) -> list[Part]:
        return stream() if request.json.get("stop") else [HANG]

    with connected(answer) as (streams, server):
        one = Running(streams)
        first = server.request()
        one.submission.cancel()
        one.submission.cancel()
        second = server.request(1)
        assert first.left.wait(PATIENCE_S)
    assert (second.json["stop"], second.json["id"]) == (True, first.json["id"])
    assert len(server.requests) == 2
    assert one.items == []


def test_cancel_after_a_token_only_closes() -> None:
    with connected([*stream(event(output_ids=1), end=False), HANG]) as (streams, server):
        one, two = Running(streams), Running(streams)
        wait_until(lambda: one.ids == two.ids == [1])
        one.submission.cancel()
        wait_until(lambda: any(request.left.is_set() for request in server.requests))
        assert sum(request.left.is_set() for request in server.requests) == 1
        assert not two.ended.is_set()
    assert len(server.requests) == 2
    assert (one.ids, one.ended.is_set()) == ([1], False)


def test_cancel_while_the_first_token_is_taken_only_closes() -> None:
    with connected([*stream(event(output_ids=1), end=False), HANG]) as (streams, server):
        submitted, taken = Event(), Event()

        def take(item: StepItem) -> None:
            assert submitted.wait(PATIENCE_S)
            submission.cancel()
            taken.set()

        request = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=9))
        submission = streams.submit(request, {}, take)
        submitted.set()
        assert taken.wait(PATIENCE_S)
        Running(streams)  # what was sent before has come, too
        server.request(1)
    assert not any(request.json.get("stop") for request in server.requests)


def test_cancel_after_the_end_does_nothing() -> None:
    with connected(stream()) as (streams, server):
        one = Running(streams)
        assert one.wait() == ([], None)
        one.submission.cancel()
    assert len(server.requests) == 1


def test_close_fails_what_runs() -> None:
    with connected([HANG]) as (streams, server):
        one = Running(streams)
        server.request()
        streams.close()
        assert re.match("E2105 .*try again", str(one.wait()[1]))
        with pytest.raises(TritonUnavailable):
            Running(streams)


def test_many_requests_at_once() -> None:
    count, all_here = 100, Event()
    answer = stream(event(output_ids=1), all_here, event(output_ids=2))
    with connected(answer) as (streams, server):
        running = [Running(streams) for _ in range(count)]
        server.request(count - 1)
        all_here.set()
        assert [one.wait() for one in running] == [([1, 2], None)] * count
    assert len({request.json["id"] for request in server.requests}) == count
