"""Session of a step stream: steps in order, each once, answers, acknowledgements and stops."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from scripted_server import HANG, RESET, wait_until, whole
from scripted_steps import RESENT, ScriptedSteps, heartbeat, step
from step_requests import Running, connect, made, stream, triton

from cog_triton import errors
from cog_triton.engines import step_items
from cog_triton.engines.generate_stream import to_error
from cog_triton.engines.step_items import StepItem
from cog_triton.triton.step_stream import StepStream

__all__ = ["stream", "triton"]


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


def test_many_requests_at_once(triton: ScriptedSteps, stream: StepStream) -> None:
    running = [Running(stream) for _ in range(100)]
    for number in range(1, 6):
        end = step_items.LENGTH if number == 5 else 0
        items = [made(handle, number - 1, handle, end=end) for handle in range(1, 101)]
        triton.send(step(number, *items))
    for handle, one in enumerate(running, 1):
        assert one.wait().end == step_items.LENGTH
        assert one.ids == [handle] * 5
