"""Step streams: requests of all callers on one gRPC stream, and pipes that are opened again."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_thread import OnLoop, call
from scripted_server import PATIENCE_S, wait_until
from scripted_steps import ScriptedSteps, step
from scripted_triton import to_error

from cog_triton.engines import step_pipe
from cog_triton.engines.engine_messages import Cancel
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import StepItem
from cog_triton.errors import InvalidArgument, TritonUnavailable
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton.step_stream import EngineChannel, StepStreams, StepSubmission

REQUEST = EngineRequest(input_ids=[5, 300, 70_000], sampling=SamplingParams(max_tokens=9))
ONE = {0: 1}


def make_request(request: EngineRequest, inputs: Mapping[str, Any]) -> EngineRequest:
    if inputs.get("seed") == -1:
        raise InvalidArgument("seed=-1")
    return replace(request, **inputs)


@contextmanager
def connected(triton: ScriptedSteps, count: int = 1, timeout: float = 600) -> Iterator[Any]:
    """Streams that are to be opened, on the loop."""
    made = StepStreams(
        lambda: triton.target, lambda: "secret", timeout, to_error, make_request, count
    )
    try:
        yield OnLoop(made)
    finally:
        call(made.disconnect)


class Running:
    """A submitted request and the items it got."""

    def __init__(
        self, streams: StepStreams, request: EngineRequest = REQUEST, **engine_inputs: Any
    ) -> None:
        self.items: list[StepItem] = []
        self.ended = threading.Event()
        self.submission = OnLoop(streams.submit(request, engine_inputs, self._put))

    def _put(self, item: StepItem) -> None:
        assert not self.ended.is_set(), "an item after the end"
        self.items.append(item)
        if item.end:
            self.ended.set()

    @property
    def ids(self) -> list[int]:
        return [token for item in self.items for token in item.ids]

    def wait(self) -> StepItem:
        assert self.ended.wait(2 * PATIENCE_S)
        return self.items[-1]

    def error(self) -> str:
        return str(self.wait().error)


def made(handle: int, offset: int, *ids: int, end: int = 0) -> StepItem:
    return StepItem(handle, 0, offset, list(ids), [], end)


@pytest.fixture
def triton() -> Iterator[ScriptedSteps]:
    with ScriptedSteps() as triton:
        yield triton


@pytest.fixture
def streams(triton: ScriptedSteps) -> Iterator[StepStreams]:
    with connected(triton) as streams:
        streams.open(ONE)
        yield streams


def serves_again(streams: StepStreams, triton: ScriptedSteps, number: int) -> None:
    """By the pipe that is opened in the place of one that has ended."""
    pipe = triton.pipe(number)
    wait_until(lambda: streams.serving)
    running = Running(streams)
    pipe.send(step(made(pipe.requests()[0].handle, 0, 8, end=1)))
    running.wait()
    assert running.ids == [8]


def test_responses_that_triton_mixes_up_are_read_in_order(
    streams: StepStreams, triton: ScriptedSteps
) -> None:
    """A reader that is behind gets responses of two requests; a step may be in several."""
    running = Running(streams)
    pipe = triton.pipe()
    handle = pipe.requests()[0].handle
    content = b"".join(step(made(handle, place, place, end=place // 9)) for place in range(10))
    parts = [content[place : place + 50] for place in range(0, len(content), 50)]
    mixed = [*range(3), *range(6, len(parts)), 5, 3, 4]
    pipe.send_mixed(*parts, order=mixed)
    running.wait()
    assert running.ids == list(range(10))


def test_opening_waits_for_the_engine_that_serves_and_fails_with_its_death_only(
    streams: StepStreams, triton: ScriptedSteps
) -> None:
    triton.welcomes = False
    gone = "E2105 TritonUnavailable: the engine's process has ended"
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(streams.open, {0: 2})
        with pytest.raises(TimeoutError):
            opening.result(0.2)  # the one before it serves
        triton.pipe(0).fail(gone)
        triton.pipe(1).fail(gone)  # no other is opened at once
        pipe = triton.pipe(2)
        assert not opening.done()
        pipe.welcome(2)
        opening.result(PATIENCE_S)
        streams._engines[0].reopen_at = streams._reopening_at = math.inf
        pipe.fail(gone)
        wait_until(lambda: not streams.serving)
        opening = pool.submit(streams.open, {0: 2})
        triton.pipe(3).fail(gone)
        with pytest.raises(TritonUnavailable, match="has ended"):
            opening.result(PATIENCE_S)


@pytest.mark.parametrize("of_engine", [True, False])
def test_what_runs_at_an_end_fails_and_the_pipe_is_opened_again(
    streams: StepStreams, triton: ScriptedSteps, of_engine: bool
) -> None:
    running, pipe = Running(streams), triton.pipe()
    pipe.requests()
    if of_engine:
        pipe.fail("E2105 TritonUnavailable: the engine's process has ended")
        assert running.error() == "E2105 TritonUnavailable: the engine's process has ended"
        assert pipe.closed.wait(PATIENCE_S), "Triton's model still has it"
    else:
        triton.break_streams()
        assert running.error().startswith("E2105 TritonUnavailable: Triton has ended the stream")
    serves_again(streams, triton, 1)
    assert streams.lost_steps == 1


@pytest.mark.parametrize(
    "content", [b"\xff\xff\xff\xff", b"\0\0\0\1\x77", b"\0\0\0\2\0\0", step(made(1, 0))[:-8] * 2]
)
def test_malformed_bytes_end_the_pipe_only(
    streams: StepStreams, triton: ScriptedSteps, content: bytes
) -> None:
    running = Running(streams)
    triton.pipe().requests()
    triton.pipe().send(content)
    assert running.error().startswith("E2105")
    assert triton.pipe().closed.wait(PATIENCE_S)
    serves_again(streams, triton, 1)


def test_a_request_that_gets_nothing_times_out_and_is_cancelled(triton: ScriptedSteps) -> None:
    with connected(triton, timeout=0.3) as streams:
        streams.open(ONE)
        running, pipe = Running(streams), triton.pipe()
        assert running.error().startswith("E2101 TritonTimeout")
        wait_until(lambda: Cancel(pipe.submits[0].handle) in pipe.messages)
        pipe.send(step(made(pipe.submits[0].handle, 0, 3, end=3)))  # comes too late
        other = Running(streams)
        pipe.send(step(made(pipe.requests(2)[1].handle, 0, 4, end=1)))
        other.wait()
        assert len(running.items) == 1


def test_a_cancelled_request_gets_nothing_and_is_not_sent_if_it_waits(
    triton: ScriptedSteps,
) -> None:
    triton.welcomes = False
    with ThreadPoolExecutor(1) as pool, connected(triton) as streams:
        opening = pool.submit(streams.open, ONE)
        pipe = triton.pipe()
        waiting = Running(streams)
        waiting.submission.cancel()
        pipe.welcome()
        opening.result(PATIENCE_S)
        running = Running(streams)
        handle = pipe.requests()[0].handle
        running.submission.cancel()
        running.submission.cancel()
        wait_until(lambda: Cancel(handle) in pipe.messages)
        pipe.send(step(made(handle, 0, 1, end=3)))
        other = Running(streams)
        pipe.send(step(made(pipe.requests(2)[1].handle, 0, 4, end=1)))
        other.wait()
        assert len(pipe.submits) == 2
        assert running.items == waiting.items == []


ITEMS = [made(handle, offset, *range(handle)) for offset in range(3) for handle in range(5)]
SENT = b"".join(step(item, *ITEMS[:place]) for place, item in enumerate(ITEMS))


@given(st.lists(st.integers(0, len(SENT)), max_size=40))
def test_any_cutting_of_the_bytes_gives_the_same_items(cuts: list[int]) -> None:
    streams = StepStreams(str, str, 600, to_error, make_request)
    engine, found = EngineChannel(streams, 0), list[StepItem]()
    for handle in range(5):
        engine.running[handle] = StepSubmission(engine, handle, found.append, 1)
    for number, (start, end) in enumerate(itertools.pairwise(sorted({0, len(SENT), *cuts}))):
        content = step_pipe.numbered(number, SENT[start:end])
        response = SimpleNamespace(raw_output_contents=[content])
        engine.on_response(response, last=False)
    sent = [(item, *ITEMS[:place]) for place, item in enumerate(ITEMS)]
    assert found == list(itertools.chain(*sent))
