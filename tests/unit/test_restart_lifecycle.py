"""Lifecycle of the supervised Triton: states, backoff and giving up, without clock or process."""

from __future__ import annotations

from cog_triton.errors import TritonStartFailed, TritonUnavailable
from cog_triton.serving.lifecycle import Lifecycle, SupervisorState


def failed(life: Lifecycle, *, stable: bool = False, blamed: bool = False) -> None:
    life.failed("it died\nlast lines", 2.0, stable=stable, blamed=blamed)


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_stable_time() -> None:
    life = Lifecycle(99)
    pauses = []
    for _ in range(9):
        failed(life)
        pauses.append(life.pause)
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    failed(life, stable=True)
    assert life.pause == 0


def test_it_gives_up_after_failures_in_a_row_and_tells_requests_less_than_operators() -> None:
    life = Lifecycle(1)
    life.ready()
    failed(life)
    assert life.state is SupervisorState.RESTARTING
    assert isinstance(life.error, TritonUnavailable)
    assert life.error.detail == "it died; Triton is being restarted, try again in 2 s"
    assert life.refusal is life.error
    life.start_failed("no memory\nlast lines", 2.0)
    assert life.state is SupervisorState.FAILED
    assert isinstance(life.error, TritonStartFailed)
    given_up = "given up after 1 restarts in a row (TRITON_MAX_RESTARTS): no memory"
    assert life.error.detail == f"{given_up}\nlast lines"
    assert life.refusal.detail == f"{given_up}; the server stops"


def test_a_death_that_a_request_is_blamed_for_does_not_count() -> None:
    life = Lifecycle(1)
    for _ in range(5):
        failed(life, blamed=True)
        assert life.state is SupervisorState.RESTARTING
        life.ready()
    assert life.error is None


def test_without_restarts_it_stops() -> None:
    life = Lifecycle(5)
    life.restarts_disabled = True
    failed(life)
    assert life.state is SupervisorState.STOPPED
    assert life.refusal.detail == "it died; the server is stopping"
