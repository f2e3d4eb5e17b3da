"""Restarts: pauses, failures in a row, and when it is enough."""

from __future__ import annotations

import pytest

from cog_triton.processes.restarts import Restarts


def failed(times: int, most: float = 2) -> Restarts:
    rule = Restarts(most)
    for _ in range(times):
        rule.failed(stable=False)
    return rule


def test_the_first_restart_comes_at_once_and_the_next_ones_later() -> None:
    pauses = [failed(times).pause for times in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5000)]
    assert pauses == [0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(
    ("before", "stable", "counts", "after"),
    [(3, True, True, 1), (0, False, False, 1), (1, False, False, 1), (3, False, False, 3)],
)
def test_failures_that_are_not_one_more_in_a_row(
    before: int, stable: bool, counts: bool, after: int
) -> None:
    rule = failed(before)
    rule.failed(stable=stable, counts=counts)
    assert rule.failures == after


def test_it_is_given_up_after_the_most_restarts() -> None:
    assert [failed(times).given_up for times in (1, 2, 3)] == [False, False, True]
    assert failed(1, most=0).given_up
    sentence = "given up after 2 restarts in a row (TRITON_MAX_RESTARTS): it died"
    assert failed(3).sentence("it died") == sentence
