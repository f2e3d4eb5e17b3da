"""Scheduler of the mock engine, on a fake clock: rates, slots, coalescing, cancellation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_requests import MODEL, PASSAGE, expected_tokens, request

from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.engines.mock.scheduler import Scheduler, StepClock, TokenSchedule
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import InvalidArgument, PromptTooLong, TritonUnknownError
from cog_triton.text.guide import Guide

GUIDE = Guide("json_schema", "{}")

FOREVER = 9000


class World:
    """A scheduler, its clock, and what came of each stream: (time, event)."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self.injected: list[str] = []
        self.events: dict[int, list[tuple[float, TokenEvent]]] = defaultdict(list)
        self.scheduler = Scheduler(
            MODEL, MockOptions(**options), self.injected.append, clock=lambda: self.now
        )

    def run(self, seconds: float, cost: float = 0.0, late: float = 0.0) -> None:
        """Let time pass: sending an event takes `cost` seconds, each waking comes `late`."""
        end = self.now + seconds
        while (due := self.scheduler.next_due()) is not None and due <= end:
            self.now = max(self.now, due + late)
            if self.now > end:
                break
            for handle, event in self.scheduler.due():
                self.events[handle].append((self.now, event))
                self.now += cost
        self.now = max(self.now, end)

    def ids(self, handle: int) -> list[int]:
        return [token for _, event in self.events[handle] for token in event.token_ids]

    def times(self, handle: int, since: float = 1000.0) -> list[float]:
        """When each token came."""
        return [at - since for at, event in self.events[handle] for _ in event.token_ids]

    def end(self, handle: int) -> TokenEvent:
        return self.events[handle][-1][1]


def test_tokens_come_at_the_rate_and_the_last_ends_the_stream() -> None:
    world = World(tps=100)
    world.scheduler.submit(1, request(5))
    world.run(10)
    assert world.times(1) == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    assert world.ids(1) == expected_tokens(5)
    assert [event.finish for _, event in world.events[1]] == [None, None, None, None, "length"]
    assert world.scheduler.next_due() is None


@given(st.floats(0.001, 0.03), st.floats(0, 0.004), st.integers(1, 7))
def test_delays_do_not_accumulate(late: float, cost: float, streams: int) -> None:
    """However late each token is, the last ones are no later than the first."""
    world = World(tps=100)
    for handle in range(streams):
        world.scheduler.submit(handle, request(1000))
    world.run(20, cost=cost, late=late)
    for handle in range(streams):
        assert world.ids(handle) == expected_tokens(1000)
        lateness = [time - 0.01 * k for k, time in enumerate(world.times(handle), 1)]
        assert min(lateness) > -1e-9
        assert max(lateness) <= late + (streams + 1) * cost + 0.01 + 1e-9


def test_a_late_stream_coalesces_all_due_tokens_into_one_response() -> None:
    world = World(tps=100)
    world.scheduler.submit(1, request(FOREVER))
    world.now += 0.0351
    ((_, event),) = world.scheduler.due()
    assert event.token_ids == expected_tokens(3)
    world.run(0.01)
    assert world.ids(1) == expected_tokens(4)[3:]


def test_without_join_late_tokens_are_sent_one_by_one_and_streams_alternate() -> None:
    world = World(tps=100, join=False)
    world.scheduler.submit(1, request(3))
    world.scheduler.submit(2, request(4, tokens_per_response=2))
    world.now += 1
    turns = []
    while world.scheduler.next_due() is not None:
        turns.append([(handle, event.token_ids) for handle, event in world.scheduler.due()])
    assert turns == [
        [(1, expected_tokens(1)), (2, expected_tokens(2))],
        [(1, expected_tokens(2)[1:]), (2, expected_tokens(4)[2:])],
        [(1, expected_tokens(3)[2:])],
    ]


def test_without_join_the_rate_is_kept() -> None:
    world = World(tps=100, join=False)
    world.scheduler.submit(1, request(300))
    world.run(10, late=0.035)
    assert world.ids(1) == expected_tokens(300)
    assert {len(event.token_ids) for _, event in world.events[1]} == {1}
    assert world.times(1)[-1] <= 3.0351


def test_the_end_of_a_late_stream_is_in_the_same_response() -> None:
    world = World(tps=100)
    world.scheduler.submit(1, request(5))
    world.now += 1
    ((_, event),) = world.scheduler.due()
    assert (event.token_ids, event.finish) == (expected_tokens(5), "length")


def test_prefill_time_is_proportional_to_the_prompt() -> None:
    world = World(tps=100, prefill_ms=2)
    world.scheduler.submit(1, request(2, prompt=50))
    world.scheduler.submit(2, request(2, prompt=50, prefill_ms=0))
    world.run(1)
    assert world.times(1) == pytest.approx([0.11, 0.12])
    assert world.times(2) == pytest.approx([0.01, 0.02])


def test_tokens_in_groups_leave_when_the_last_is_due() -> None:
    world = World(tps=10, tokens_per_response=4)
    world.scheduler.submit(1, request(10))
    world.scheduler.submit(2, request(3, tokens_per_response=2))
    world.run(10)
    assert [len(event.token_ids) for _, event in world.events[1]] == [4, 4, 2]
    assert world.times(1) == pytest.approx([0.4] * 4 + [0.8] * 4 + [1.0] * 2)
    assert world.times(2) == pytest.approx([0.2, 0.2, 0.3])


def test_a_request_has_its_own_rate() -> None:
    world = World(tps=10)
    world.scheduler.submit(1, request(3, tps=100.0))
    world.scheduler.submit(2, request(3))
    world.run(10)
    assert world.times(1) == pytest.approx([0.01, 0.02, 0.03])
    assert world.times(2) == pytest.approx([0.1, 0.2, 0.3])


def test_streams_at_unlimited_rate_alternate() -> None:
    world = World(tps=0, prefill_ms=1)
    world.scheduler.submit(1, request(4))
    world.scheduler.submit(2, request(4, tokens_per_response=2))
    world.now += 0.003
    turns = []
    while list(world.scheduler._slots):
        turns.append([(handle, event.token_ids) for handle, event in world.scheduler.due()])
    assert turns == [
        [(1, expected_tokens(1)), (2, expected_tokens(2))],
        [(1, expected_tokens(2)[1:]), (2, expected_tokens(4)[2:])],
        [(1, expected_tokens(3)[2:])],
        [(1, expected_tokens(4)[3:])],
    ]


def test_streams_at_unlimited_rate_do_not_delay_a_slow_one() -> None:
    world = World(tps=0)
    for handle in range(3):
        world.scheduler.submit(handle, request(FOREVER))
    world.scheduler.submit(9, request(FOREVER, tps=100.0))
    world.run(1, cost=0.0001)
    assert len(world.ids(9)) in (99, 100)


@pytest.mark.parametrize("jitter", [0.3, 1.0])
def test_jitter_is_bounded_and_reproducible_by_seed(jitter: float) -> None:
    def times(seed: int) -> list[float]:
        world = World(tps=100, jitter=jitter)
        world.scheduler.submit(1, request(2000, seed=seed))
        world.run(30)
        assert world.ids(1) == expected_tokens(2000)
        return world.times(1)

    strayed = [time * 100 - k for k, time in enumerate(times(7), 1)]
    assert all(abs(offset) <= jitter / 2 + 1e-6 for offset in strayed)
    assert abs(sum(strayed) / len(strayed)) < 0.05 * jitter
    assert max(strayed) > 0.4 * jitter
    assert min(strayed) < -0.4 * jitter
    assert times(7) == times(7)
    assert times(7) != times(8)


@given(st.floats(0.1, 1e5), st.floats(0, 1), st.integers(0, 2**64 - 1), st.integers(1, 10**6))
def test_due_times_never_decrease(tps: float, jitter: float, seed: int, token: int) -> None:
    table = TokenSchedule(0.0, tps, jitter, seed)
    assert table.due(token) <= table.due(token + 1)


def test_a_request_without_a_slot_waits_in_the_queue() -> None:
    world = World(tps=10, max_batch_size=2)
    for handle in (1, 2, 3, 4):
        world.scheduler.submit(handle, request(handle + 1))
    world.run(10)
    assert world.times(1) == pytest.approx([0.1, 0.2])
    assert world.times(3) == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert world.times(4)[0] == pytest.approx(0.4)
    assert all(world.ids(handle) == expected_tokens(handle + 1) for handle in (1, 2, 3, 4))


def test_cancel_silences_a_stream_and_frees_its_slot() -> None:
    world = World(tps=10, max_batch_size=1)
    world.scheduler.submit(1, request(FOREVER))
    world.scheduler.submit(2, request(2))
    world.run(0.35)
    assert world.scheduler.cancel(1)
    assert not world.scheduler.cancel(1)
    world.run(10)
    assert world.ids(1) == expected_tokens(3)
    assert world.times(2) == pytest.approx([0.45, 0.55])
    assert world.scheduler.next_due() is None


def test_cancel_works_while_queued_and_while_due() -> None:
    world = World(tps=10, max_batch_size=2)
    for handle in (1, 2, 3):
        world.scheduler.submit(handle, request(3))
    assert world.scheduler.cancel(3)
    world.now += 5
    taking = world.scheduler.due()
    assert next(taking)[0] == 1
    world.scheduler.cancel(2)
    assert list(taking) == []
    assert not world.scheduler.cancel(99)


def test_a_stop_word_is_generated_but_not_sent() -> None:
    world = World(tps=10)
    world.scheduler.submit(1, request(50, stop_words=((12, 13),)))
    world.scheduler.submit(2, request(50, end_id=12))
    world.scheduler.submit(3, request(8, end_id=-1))
    world.run(10)
    assert (world.ids(1), world.ids(2), world.ids(3)) == ([10, 11], [10, 11], expected_tokens(8))
    assert [world.end(handle).finish for handle in (1, 2, 3)] == ["stop", "stop", "length"]
    assert world.events[1][-1][0] == pytest.approx(1000.4)
    assert world.events[2][-1][0] == pytest.approx(1000.3)


def test_tokens_that_are_not_allowed_are_never_made() -> None:
    world = World(tps=10)
    allowed = (PASSAGE[1], PASSAGE[3])
    for handle, ids in enumerate((allowed, (5,))):
        plain = request(max_tokens=6)
        sampling = replace(plain.sampling, allowed_token_ids=ids)
        world.scheduler.submit(handle, replace(plain, sampling=sampling))
    world.run(10)
    assert set(world.ids(0)) == set(allowed)
    assert world.ids(1) == [5] * 6, "none of the passage"


def test_a_step_clock_makes_allowed_tokens_alone() -> None:
    events: list[int] = []
    now = 0.0
    clock = StepClock(MODEL, MockOptions(step_ms=10), lambda how: None, lambda: now)
    plain = request(max_tokens=4)
    sampling = replace(plain.sampling, allowed_token_ids=(PASSAGE[2],))
    clock.submit(1, replace(plain, sampling=sampling))
    while (due := clock.next_due()) is not None:
        now = due
        events += [token for _, event in clock.due() for token in event.token_ids]
    assert events == [PASSAGE[2]] * 4


def test_log_probs_are_sent_on_request() -> None:
    world = World(tps=0)
    world.scheduler.submit(1, request(2, return_log_probs=True))
    world.scheduler.submit(2, request(2))
    world.run(1)
    assert [event.log_probs for _, event in world.events[1]] == [[0.0], [0.0]]
    assert [event.log_probs for _, event in world.events[2]] == [[], []]


def test_an_injected_error_ends_only_its_own_request() -> None:
    world = World(tps=10)
    world.scheduler.submit(1, request(5, inject="error", inject_after=3))
    world.scheduler.submit(2, request(5))
    world.run(10)
    assert world.ids(1) == expected_tokens(3)
    assert isinstance(world.end(1).error, TritonUnknownError)
    assert world.events[1][-1][0] == pytest.approx(1000.4)
    assert world.ids(2) == expected_tokens(5)
    assert world.scheduler.next_due() is None


@pytest.mark.parametrize("kind", ["crash", "hang"])
@pytest.mark.parametrize("rate", [0, 10])
def test_an_injected_crash_or_hang_is_reported_at_its_token(kind: Any, rate: float) -> None:
    world = World(tps=rate)
    world.scheduler.submit(1, request(5, inject=kind, inject_after=2))
    for _ in range(9):
        world.now += 0.1
        world.events[1] += [(world.now, event) for _, event in world.scheduler.due()]
        if world.injected:
            break
    assert world.injected == [kind]
    assert world.ids(1) == expected_tokens(2)


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"prompt": 0}, InvalidArgument, "input_ids: empty"),
        ({"max_tokens": 9998}, PromptTooLong, "exceed maximum sequence length (10000)"),
        ({"bad_words": ((1,),)}, InvalidArgument, "bad_words_list: this engine"),
        ({"guide": GUIDE}, InvalidArgument, "guided_decoding_guide: this engine"),
    ],
)
def test_unservable_requests_are_refused(
    values: dict[str, Any], error: type[Exception], text: str
) -> None:
    world = World()
    with pytest.raises(error) as caught:
        world.scheduler.submit(1, request(**values))
    assert text in str(caught.value)
    assert world.scheduler.next_due() is None


@pytest.mark.parametrize("token", [-1, MODEL.vocab_size])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidArgument, match=f"input_ids: holds {token}; must be from 0 to 99"):
        World().scheduler.submit(1, replace(request(), input_ids=[3, token]))


def test_kv_cache_use_is_that_of_prompts_and_tokens_in_slots() -> None:
    world = World(tps=100, max_batch_size=2)
    assert world.scheduler.kv_cache() == KVCacheStats(0, 32, 128)
    for handle in (1, 2, 3):
        world.scheduler.submit(handle, request(100, prompt=31))
    assert world.scheduler.kv_cache().usage == 2 * 1 / 128  # the third waits
    world.run(0.02)
    assert world.scheduler.kv_cache().usage == 2 * 2 / 128
    world.scheduler.cancel(1)
    world.scheduler.cancel(2)
    world.scheduler.cancel(3)
    assert world.scheduler.kv_cache().usage == 0
