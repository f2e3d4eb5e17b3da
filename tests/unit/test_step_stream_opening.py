"""Step stream that opens, breaks, is opened again and closes, and what its requests are told."""

from __future__ import annotations

from concurrent import futures
from threading import Event

import pytest
from scripted_server import HANG, PATIENCE_S, event, wait_until, whole
from scripted_server import stream as answer_stream
from scripted_steps import ScriptedSteps, heartbeat, step
from step_requests import REQUEST, Running, connect, made, stream, triton

from cog_triton.engines import step_items
from cog_triton.engines.step_items import StepItem
from cog_triton.errors import TritonUnavailable
from cog_triton.triton import step_session
from cog_triton.triton.step_session import StepSession
from cog_triton.triton.step_stream import StepStream

__all__ = ["stream", "triton"]


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
    wait_until(lambda: triton.opened >= 2)


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
