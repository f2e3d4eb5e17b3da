"""Step stream, front end's side, against a Triton that sends what the test says."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent import futures
from threading import Event
from typing import Any

import pytest
from scripted_server import HANG, PATIENCE_S, RESET, event, wait_until, whole
from scripted_server import stream as answer_stream
from scripted_steps import RESENT, ScriptedSteps, heartbeat, step

from cog_triton import errors
from cog_triton.engines import step_items, tensor_contract
from cog_triton.engines.generate_stream import to_error
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import StepItem
from cog_triton.errors import TritonUnavailable
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton import step_session
from cog_triton.triton.step_session import StepSession
from cog_triton.triton.step_stream import StepStream
from cog_triton.triton.token_transport import Submission

REQUEST = EngineRequest(input_ids=[5, 300, 70_000], sampling=SamplingParams(max_tokens=9))


class Running:
    """A submitted request and the items it got."""

    def __init__(self, stream: StepStream, **engine_inputs: Any) -> None:
        self.items: list[StepItem] = []
        self.ended = Event()
        self.submission: Submission = stream.submit(REQUEST, engine_inputs, self._put)

    def _put(self, item: StepItem) -> None:
        assert not self.ended.is_set(), "an item after the end"
        self.items.append(item)
        if item.end:
            self.ended.set()

    @property
    def ids(self) -> list[int]:
        return [token for item in self.items for token in item.ids]

    def wait(self) -> StepItem:
        """The last item."""
        assert self.ended.wait(2 * PATIENCE_S)
        return self.items[-1]

    def error(self) -> str:
        item = self.wait()
        assert item.end == step_items.ERROR
        return str(item.error)


def made(handle: int, offset: int, *ids: int, end: int = 0) -> StepItem:
    return StepItem(handle, 0, offset, list(ids), [], end)


@pytest.fixture
def triton() -> Iterator[ScriptedSteps]:
    with ScriptedSteps() as triton:
        yield triton


def connect(triton: ScriptedSteps, timeout: float = 60) -> StepStream:
    return StepStream(triton.url, timeout, to_error, tensor_contract.encode_request)


@pytest.fixture
def stream(triton: ScriptedSteps) -> Iterator[StepStream]:
    stream = connect(triton)
    stream.open()
    yield stream
    stream.close()


def test_requests_get_their_items_of_each_step(triton: ScriptedSteps, stream: StepStream) -> None:
    one, two = Running(stream), Running(stream)
    triton.send(step(1, made(1, 0, 10), made(2, 0, 20, 21)), step(2, made(1, 1, 11)))
    triton.send(step(3, made(2, 2, end=step_items.LENGTH), made(1, 2, 12, end=step_items.STOP)))
    assert one.wait() == made(1, 2, 12, end=step_items.STOP)
    assert two.wait() == made(2, 2, end=step_items.LENGTH)
    assert (one.ids, two.ids) == ([10, 11, 12], [20, 21])
    assert stream.last_token_at > 0
    assert stream.statistics.lost_steps == 0


def test_a_request_names_stream_handle_and_packed_ids(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    Running(stream, tps=3)
    Running(stream)
    first, second = triton.wait_for("submit", 2)
    if first["step_handle"] == 2:  # each on a connection of its own
        first, second = second, first
    (opened,) = triton.commands("open")
    assert len(opened["step_stream"]) == 32
    assert first["step_stream"] == second["step_stream"] == opened["step_stream"]
    assert (first["step_handle"], second["step_handle"]) == (1, 2)
    packed = base64.b64decode(first["packed_input_ids"])
    assert struct.unpack("<3i", packed) == (5, 300, 70_000)
    assert not {"input_ids", "input_lengths", "id"} & first.keys()
    assert (first["request_output_len"], first["tps"]) == (9, 3)
    assert "tps" not in second


def test_log_probs_and_errors_come_with_their_items(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    one, two = Running(stream), Running(stream)
    failed = StepItem(2, 0, 0, [], [], step_items.ERROR, "E2105 TritonUnavailable: gone")
    triton.send(step(1, StepItem(1, 0, 0, [7], [-0.5], 0, None, 1), failed))
    assert two.error() == "E2105 TritonUnavailable: gone"
    assert one.items == [StepItem(1, 0, 0, [7], [-0.5], 0, None, 1)]


def test_open_waits_for_the_first_heartbeat_and_raises_its_error(triton: ScriptedSteps) -> None:
    triton.instead["open"] = [whole(b'{"error": "E2105 TritonUnavailable: loading"}', "400 Bad")]
    stream = connect(triton)
    with pytest.raises(TritonUnavailable, match="loading"):
        stream.open()
    triton.instead.clear()
    stream.open()
    stream.close()


def test_open_without_triton_is_e2105(triton: ScriptedSteps) -> None:
    triton.server.__exit__()
    stream = connect(triton)
    with pytest.raises(TritonUnavailable):
        stream.open()
    stream.close()
    triton.server.__init__(lambda _: [])  # type: ignore[misc]
    triton.server.__enter__()


def test_an_open_that_hangs_ends(triton: ScriptedSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_session, "_OPENING_S", 0.3)
    triton.instead["open"] = [HANG]
    stream = connect(triton)
    with pytest.raises(TritonUnavailable, match=r"silent for 0\.3 s"):
        stream.open()
    stream.close()


def test_lost_step_is_sent_again_and_nothing_is_doubled(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    one = Running(stream)
    triton.send(step(1, made(1, 0, 10)))
    triton.send(step(3, made(1, 2, 12)), step(4, made(1, 3, 13)))
    (asked,) = triton.wait_for("resend")
    assert asked["step_number"] == 2
    for number in (2, 3, 4):
        triton.send(step(number, made(1, number - 1, 9 + number), flags=RESENT))
    triton.send(step(4, made(1, 3, 13)), step(5, made(1, 4, 14, end=step_items.STOP)))
    one.wait()
    assert one.ids == [10, 11, 12, 13, 14]
    assert len(triton.commands("resend")) == 1
    assert stream.statistics.lost_steps == 0


def test_lost_last_step_is_seen_by_the_heartbeat(triton: ScriptedSteps, stream: StepStream) -> None:
    one = Running(stream)
    triton.send(step(1, made(1, 0, 10)), heartbeat(1))
    triton.send(heartbeat(2))
    (asked,) = triton.wait_for("resend")
    assert asked["step_number"] == 2
    triton.send(step(2, made(1, 1, 11, end=step_items.STOP), flags=RESENT))
    one.wait()
    assert one.ids == [10, 11]


def test_step_that_is_lost_again_is_asked_for_again(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    """What comes after it, though sent again, does not mean that it is gone."""
    one = Running(stream)
    triton.send(step(2, made(1, 1, 11)))
    triton.wait_for("resend")
    triton.send(step(2, made(1, 1, 11), flags=RESENT))

    def asked_twice() -> bool:
        triton.send(heartbeat(2))
        return len(triton.commands("resend")) > 1

    wait_until(asked_twice)
    assert one.items == []
    for number in (1, 2):
        triton.send(step(number, made(1, number - 1, 9 + number), flags=RESENT))
    triton.send(step(3, made(1, 2, 12, end=step_items.STOP)))
    one.wait()
    assert one.ids == [10, 11, 12]


def test_failed_resend_is_asked_again(triton: ScriptedSteps, stream: StepStream) -> None:
    triton.instead["resend"] = [RESET]
    one = Running(stream)

    def asked_twice() -> bool:
        triton.send(heartbeat(1))
        return len(triton.commands("resend")) > 1

    wait_until(asked_twice)
    triton.send(step(1, made(1, 0, 10, end=step_items.STOP), flags=RESENT))
    one.wait()
    assert one.ids == [10]


def test_gone_steps_show_as_a_gap_in_those_that_were_in_them(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    triton.first_kept = 4
    one, two, three = Running(stream), Running(stream), Running(stream)
    triton.send(step(1, made(1, 0, 10), made(2, 0, 20), made(3, 0, 30)))
    triton.send(step(4, made(1, 2, 12), made(2, 1, 21)))
    triton.wait_for("resend")
    wait_until(lambda: stream.statistics.lost_steps == 2)
    triton.send(step(4, made(1, 2, 12), made(2, 1, 21), flags=RESENT))
    triton.send(step(5, made(2, 2, 22, end=step_items.STOP)))
    two.wait()
    assert two.ids == [20, 21, 22]
    assert [item.offset for item in one.items] == [0, 2]
    triton.answer(3, step_number=3)  # its end was in a step that is gone
    assert "tokens were lost on their way" in three.error()
    assert three.error().startswith("E2105")
    assert not one.ended.is_set()


def test_an_answer_does_not_end_a_request_before_its_step(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    one = Running(stream)
    triton.answer(1, step_number=2, finish_reason="stop", output_token_count=2)
    triton.send(step(1, made(1, 0, 10)))
    wait_until(lambda: len(triton.commands("ack")) >= 1)
    assert not one.ended.is_set()
    triton.send(step(2, made(1, 1, 11, end=step_items.STOP)))
    assert one.wait().end == step_items.STOP
    assert one.ids == [10, 11]


@pytest.mark.parametrize(
    ("status", "values", "said"),
    [
        ("400 Bad Request", {"error": "E1005 InvalidArgument: top_k"}, "E1005 .*top_k"),
        ("400 Bad Request", {"error": "E2105 TritonUnavailable: no such step stream"}, "no such"),
        ("500 Internal Server Error", {}, "E2100 .*HTTP 500"),
        ("200 OK", {"error": "E1005 InvalidArgument: top_k"}, "top_k"),
        ("200 OK", {}, "E2104 .*step_number"),
        ("200 OK", {"step_number": None}, "E2104 "),
    ],
)
def test_error_answers_end_their_request(
    triton: ScriptedSteps, stream: StepStream, status: str, values: dict[str, Any], said: str
) -> None:
    one, two = Running(stream), Running(stream)
    triton.answer(1, status, **values)
    with pytest.raises(errors.CogTritonError, match=said):
        raise to_error(one.error())
    assert not two.ended.is_set()


def test_a_request_whose_connection_breaks_is_e2105(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    triton.instead["submit"] = [RESET]
    assert Running(stream).error().startswith("E2105")


@pytest.mark.parametrize("how", ["ended", "reset", "malformed", "not a step", "error"])
def test_broken_stream_fails_its_requests_and_is_opened_again(
    triton: ScriptedSteps, stream: StepStream, how: str
) -> None:
    running = [Running(stream) for _ in range(3)]
    triton.wait_for("submit", 3)
    triton.send(step(1, made(1, 0, 10)))
    wait_until(lambda: running[0].ids == [10])
    if how == "ended":
        triton.end_stream()
    elif how == "reset":
        triton.server._connections[0][0].shutdown(2)
    elif how == "malformed":
        triton.send(event(step=[7, 2, 0, 1, 1, 0]))
    elif how == "not a step":
        triton.send(event(output_ids=[1]))
    else:
        triton.send(event(error="E2105 TritonUnavailable: the engine's process has ended"))
    said = [one.error() for one in running]
    assert all(text.startswith("E2105") for text in said)
    assert ("E2104" in said[0]) is (how in ("malformed", "not a step"))
    assert ("process has ended" in said[0]) is (how == "error")

    def served() -> bool:
        try:
            stream.submit(REQUEST, {}, again.append)
        except TritonUnavailable:
            return False
        return True

    again: list[StepItem] = []
    wait_until(served)
    wait_until(lambda: triton.opened == 2)
    triton.wait_for("submit", 4)
    names = {values["step_stream"] for values in triton.commands("open")}
    assert len(names) == 2
    triton.send(step(1, made(1, 0, 10, end=step_items.STOP)))
    wait_until(lambda: again)
    assert again[0].ids == [10]


def test_requests_wait_for_a_stream_that_is_opened_again(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    gate = Event()
    triton.instead["open"] = [gate, *answer_stream(heartbeat(), end=False), HANG]
    triton.end_stream()
    triton.wait_for("open", 2)
    kept, cancelled = Running(stream), Running(stream)
    cancelled.submission.cancel()
    triton.wait_for("stop")
    assert not triton.commands("submit")
    gate.set()
    (sent,) = triton.wait_for("submit")
    later = Running(stream)
    assert [later.submission, kept.submission]
    handles = [values["step_handle"] for values in triton.wait_for("submit", 2)]
    assert handles == [sent["step_handle"], 3]
    assert sent["step_handle"] == 1


def test_a_request_that_fails_with_the_stream_may_be_sent_again_at_once(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    again: list[Running] = []
    stream.submit(REQUEST, {}, lambda item: again.append(Running(stream)))
    triton.wait_for("submit")
    triton.end_stream()
    triton.wait_for("submit", 2)
    triton.send(step(1, made(1, 0, 10, end=step_items.STOP)))
    wait_until(lambda: len(again) == 1)
    again[0].wait()
    assert again[0].ids == [10]


def test_a_request_waits_while_the_stream_is_being_opened_again(
    triton: ScriptedSteps, stream: StepStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on, open_it = Event(), Event(), stream._new_session

    def wait_and_open() -> StepSession:
        opening.set()
        assert go_on.wait(PATIENCE_S)
        return open_it()

    monkeypatch.setattr(stream, "_new_session", wait_and_open)
    triton.end_stream()
    assert opening.wait(PATIENCE_S)
    with futures.ThreadPoolExecutor() as threads:
        asked = threads.submit(Running, stream)
        with pytest.raises(futures.TimeoutError):
            asked.result(0.1)
        go_on.set()
        triton.wait_for("submit")
        triton.send(step(1, made(1, 0, 10, end=step_items.STOP)))
        asked.result(PATIENCE_S).wait()


def test_silent_stream_is_opened_again(
    triton: ScriptedSteps, stream: StepStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Running(stream)
    monkeypatch.setattr(step_session, "_SILENCE_S", 0.3)
    assert "silent for 0.3 s" in one.error()
    wait_until(lambda: triton.opened == 2)


def test_a_request_that_gets_nothing_is_stopped_with_e2101(triton: ScriptedSteps) -> None:
    stream = connect(triton, timeout=1)
    stream.open()
    one, two = Running(stream), Running(stream)
    number = 0

    def is_over() -> bool:
        nonlocal number
        number += 1
        triton.send(step(number, made(2, number - 1, 20)))
        return one.ended.is_set()

    wait_until(is_over)
    assert one.error().startswith("E2101")
    assert "1 s (TRITON_TIMEOUT)" in one.error()
    assert not two.ended.is_set()
    assert [values["step_handle"] for values in triton.wait_for("stop")] == [1]
    stream.close()


def test_steps_are_acknowledged_every_64_and_at_the_tick(
    triton: ScriptedSteps, stream: StepStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton.send(*(step(number) for number in range(1, 11)))
    assert triton.wait_for("ack")[-1]["step_number"] == 10
    monkeypatch.setattr(stream, "_session", None)  # no tick
    triton.send(*(step(number) for number in range(11, 74)))
    triton.send(step(74))
    triton.send(step(75))
    assert triton.wait_for("ack", 2)[-1]["step_number"] >= 74
    assert len(triton.commands("ack")) == 2


def test_failed_ack_is_repeated(triton: ScriptedSteps, stream: StepStream) -> None:
    triton.instead["ack"] = [whole(b'{"error": "busy"}', "400 Bad Request")]
    triton.send(step(1))
    triton.wait_for("ack", 2)
    triton.instead["ack"] = [HANG]
    triton.wait_for("ack", len(triton.commands("ack")) + 3)  # the first may still be refused
    triton.instead.clear()
    triton.send(step(2))
    wait_until(lambda: triton.commands("ack")[-1]["step_number"] == 2)


def test_cancelling_stops_the_request_once(triton: ScriptedSteps, stream: StepStream) -> None:
    one, two = Running(stream), Running(stream)
    one.submission.cancel()
    one.submission.cancel()
    (stopped,) = triton.wait_for("stop")
    assert stopped["step_handle"] == 1
    triton.send(step(1, made(1, 0, 10), made(2, 0, 20, end=step_items.STOP)))
    two.wait()
    two.submission.cancel()
    assert one.items == []
    assert len(triton.commands("stop")) == 1


def test_disconnect_closes_the_stream_and_open_opens_another(
    triton: ScriptedSteps, stream: StepStream
) -> None:
    one = Running(stream)
    stream.disconnect()
    assert one.error().startswith("E2105")
    (closed,) = triton.wait_for("close")
    assert closed["step_stream"] == triton.commands("open")[0]["step_stream"]
    with pytest.raises(TritonUnavailable, match="try again"):
        Running(stream)
    stream.open()
    assert triton.opened == 2
    Running(stream)
    triton.wait_for("submit", 2)


def test_requests_before_open_and_after_close_are_e2105(triton: ScriptedSteps) -> None:
    stream = connect(triton)
    with pytest.raises(TritonUnavailable):
        Running(stream)
    stream.open()
    one = Running(stream)
    stream.close()
    assert one.error().startswith("E2105")
    with pytest.raises(TritonUnavailable):
        Running(stream)
    with pytest.raises(TritonUnavailable, match="the server is stopping"):
        stream.open()


def test_many_requests_at_once(triton: ScriptedSteps, stream: StepStream) -> None:
    running = [Running(stream) for _ in range(100)]
    for number in range(1, 6):
        end = step_items.LENGTH if number == 5 else 0
        items = [made(handle, number - 1, handle, end=end) for handle in range(1, 101)]
        triton.send(step(number, *items))
    for handle, one in enumerate(running, 1):
        assert one.wait().end == step_items.LENGTH
        assert one.ids == [handle] * 5
