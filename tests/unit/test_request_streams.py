"""Requests on one gRPC stream, against a real gRPC server: good, malformed and missing answers."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
from loop_thread import OnLoop, call
from scripted_server import HANG, PATIENCE_S, RESET, Part, wait_until
from scripted_triton import Answer, Request, ScriptedTriton, event

from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import ERROR, STOP, StepItem
from cog_triton.errors import InvalidArgument
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


def test_whole_answers_do_not_wait_for_those_of_earlier_requests() -> None:
    """As on one stream they would."""

    def answer(request: Request) -> list[Part]:
        return [HANG] if request.values.get("tps") else [event(output_ids=[3])]

    with connected(answer) as (streams, triton):
        one = Running(streams, streaming=False, tps=1)
        triton.request()
        assert Running(streams, streaming=False).wait() == ([3], None)
        one.submission.cancel()
        assert triton.request().left.wait(PATIENCE_S), "it was stopped by its id"
        assert one.items == []


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


def test_requests_of_others_are_those_that_an_engine_has_beyond_ours() -> None:
    with connected([HANG]) as (streams, triton):
        one, _two = Running(streams), Running(streams)
        triton.request(1)
        streams.note_active(2)
        one.submission.cancel()
        streams.note_active(2)  # it may have been asked before that
        assert streams.others_at == -math.inf
        for count in (2, None):
            before = time.monotonic()
            streams.note_active(count)
            assert streams.others_at >= before
