"""Mock engine on a fake clock: when each token of every stream comes, and how streams end."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_requests import MODEL, expected_tokens, request

from cog_triton.engines.adapter_registry import AdapterRegistry, RegisteredAdapter
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.mock.engine import MockEngine
from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import InvalidArgument, TritonUnknownError

FOREVER = 9000
HANDLES = itertools.count(1)


class World:
    """An engine, its clock, and what came of each stream: (time, event)."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self.engine = MockEngine(MODEL, MockOptions(**options), lambda: self.now)
        self.events: dict[int, list[tuple[float, TokenEvent]]] = defaultdict(list)
        self.steps: list[list[int]] = []

    def ask(self, *max_tokens: int, **values: Any) -> int:
        handle = next(HANDLES)
        self.engine.submit(handle, request(*max_tokens, **values))
        return handle

    def run(self, seconds: float = 1e6, steps: int = 100_000, late: float = 0.0) -> None:
        """Step when the engine says so, or `late`, until it waits for a request."""
        end = self.now + seconds
        for _ in range(steps):
            wait = self.engine.wait_s()
            if wait is None or self.now + wait > end:
                break
            self.now += wait + (late if wait else 0.0)
            events = self.engine.step()
            self.steps.append([handle for handle, _ in events])
            for handle, event in events:
                self.events[handle].append((self.now, event))

    def ids(self, handle: int) -> list[int]:
        return [token for _, event in self.events[handle] for token in event.token_ids]

    def times(self, handle: int) -> list[float]:
        """When each token came, after the start."""
        return [at - 1000 for at, event in self.events[handle] for _ in event.token_ids]

    def sizes(self, handle: int) -> list[int]:
        return [len(event.token_ids) for _, event in self.events[handle]]

    def last(self, handle: int) -> TokenEvent:
        return self.events[handle][-1][1]


@pytest.mark.parametrize(
    ("options", "values", "times"),
    [
        ({"tps": 100}, {}, [0.01, 0.02, 0.03]),
        ({"tps": 10}, {"tps": 100.0}, [0.01, 0.02, 0.03]),
        ({"tps": 100, "prefill_ms": 2}, {"prompt": 50}, [0.11, 0.12, 0.13]),
        ({"tps": 100, "prefill_ms": 2}, {"prompt": 50, "prefill_ms": 0}, [0.01, 0.02, 0.03]),
        ({"tps": 10, "tokens_per_response": 2}, {}, [0.2, 0.2, 0.3]),
        ({"tps": 10}, {"tokens_per_response": 2}, [0.2, 0.2, 0.3]),
        ({"tps": 0, "prefill_ms": 1}, {"prompt": 9}, [0.009] * 3),
        ({"step_ms": 10, "tps": 7}, {"tps": 1000.0}, [0.01, 0.02, 0.03]),
        ({"step_ms": 10, "prefill_ms": 5}, {"prompt": 9}, [0.05, 0.06, 0.07]),
        ({"step_ms": 10, "tokens_per_response": 2}, {}, [0.01, 0.01, 0.02]),
    ],
)
def test_tokens_come_when_they_are_due(
    options: dict[str, Any], values: dict[str, Any], times: list[float]
) -> None:
    world = World(**options)
    handle = world.ask(3, **values)
    world.run()
    assert world.times(handle) == pytest.approx(times)
    assert world.ids(handle) == expected_tokens(3)


def test_at_unlimited_rate_every_token_is_an_event_and_readers_set_the_pace() -> None:
    world = World(tps=0)
    first, second = world.ask(4), world.ask(4, tokens_per_response=2)
    slow = world.ask(9, tps=100.0)
    world.run(seconds=0)
    assert world.steps == [[first, second], [first, second], [first], [first]]
    assert (world.sizes(first), world.sizes(second)) == ([1] * 4, [2, 2])
    world.run()
    assert world.times(slow)[-1] == pytest.approx(0.09)
    assert world.engine.waits_for_readers
    assert not World(tps=1).engine.waits_for_readers
    assert not World(tps=0, step_ms=1).engine.waits_for_readers


@given(st.floats(0.001, 0.03), st.integers(1, 7), st.booleans())
def test_delays_do_not_accumulate(late: float, streams: int, join: bool) -> None:
    """However late each token is, the last ones are no later than the first."""
    world = World(tps=100, join=join)
    asked = [world.ask(300) for _ in range(streams)]
    world.run(late=late)
    for handle in asked:
        assert world.ids(handle) == expected_tokens(300)
        lateness = [time - 0.01 * k for k, time in enumerate(world.times(handle), 1)]
        assert min(lateness) > -1e-9
        assert max(lateness) <= late + 0.001 + 1e-9


@pytest.mark.parametrize(("join", "sizes"), [(True, [3, 1, 1]), (False, [1] * 5)])
def test_late_tokens_share_a_response_if_they_are_joined(join: bool, sizes: list[int]) -> None:
    world = World(tps=100, join=join)
    first, second = world.ask(5), world.ask(5)
    world.now += 0.0351
    world.run()
    assert world.sizes(first) == sizes
    assert all(step in ([first, second], []) for step in world.steps), "streams take turns"
    late = world.ask(5)
    world.now += 1
    world.run()
    assert world.sizes(late) == ([5] if join else [1] * 5)
    assert world.last(late).finish == "length"


@pytest.mark.parametrize("jitter", [0.3, 1.0])
def test_jitter_is_bounded_and_reproducible_by_seed(jitter: float) -> None:
    def times(seed: int) -> list[float]:
        world = World(tps=100, jitter=jitter)
        handle = world.ask(2000, seed=seed)
        world.run()
        assert world.ids(handle) == expected_tokens(2000)
        return world.times(handle)

    strayed = [time * 100 - k for k, time in enumerate(times(7), 1)]
    assert min(strayed) >= -jitter / 2 - 1e-6
    assert max(strayed) <= jitter / 2 + 0.1 + 1e-6  # a wake-up later
    assert abs(sum(strayed) / len(strayed)) < 0.05 * jitter
    assert max(strayed) > 0.4 * jitter
    assert min(strayed) < -0.4 * jitter
    assert times(7) == times(7) != times(8)


def test_a_step_clock_advances_all_streams_together() -> None:
    world = World(step_ms=10)
    first, second = world.ask(5), world.ask(3)
    world.run(steps=1)
    world.now += 0.004
    third = world.ask(2)
    world.run()
    together = [first, second]
    assert world.steps == [together, [*together, third], [*together, third], [first], [first]]
    assert world.now == pytest.approx(1000.05)


def test_a_late_step_clock_catches_up_one_token_at_a_time() -> None:
    world = World(step_ms=10)
    handle = world.ask(40)
    world.now += 0.055
    world.run(seconds=1e-6)
    assert world.ids(handle) == expected_tokens(5)
    assert world.sizes(handle) == [1] * 5
    world.now += 60
    world.run(seconds=1e-6)
    assert len(world.ids(handle)) < 40
    world.run()
    assert world.ids(handle) == expected_tokens(40)


def test_a_request_without_a_slot_waits_in_the_queue() -> None:
    for options in ({"tps": 10}, {"step_ms": 100}):
        world = World(max_batch_size=2, **options)
        asked = [world.ask(count) for count in (2, 3, 4, 5)]
        world.run()
        assert world.times(asked[0]) == pytest.approx([0.1, 0.2])
        assert world.times(asked[2]) == pytest.approx([0.3, 0.4, 0.5, 0.6], abs=0.002)
        assert world.times(asked[3])[0] == pytest.approx(0.4, abs=0.002)


@pytest.mark.parametrize("options", [{"tps": 10}, {"tps": 0}, {"step_ms": 100}])
def test_cancel_ends_only_its_own_stream_and_frees_its_slot(options: dict[str, Any]) -> None:
    world = World(max_batch_size=1, **options)
    running, waiting, queued = world.ask(FOREVER), world.ask(2), world.ask(2)
    world.run(steps=3)
    before = world.ids(running)
    for handle in (running, queued, running, 10**9):
        world.engine.cancel(handle)
    world.run()
    assert world.last(running) == world.last(queued) == TokenEvent([], [], "cancelled")
    assert world.ids(running) == before == expected_tokens(3)
    assert world.ids(waiting) == expected_tokens(2)
    assert len(world.events[queued]) == 1
    assert world.engine.wait_s() is None


@pytest.mark.parametrize("options", [{"tps": 100}, {"tps": 0}, {"step_ms": 10}])
def test_streams_keep_what_requests_ask_for(options: dict[str, Any], tmp_path: Path) -> None:
    world = World(**options)
    registry = AdapterRegistry(tmp_path / "registry.json")
    registry.write([RegisteredAdapter("sql", 1, tmp_path, 2, "sql")])
    world.engine._registry = registry
    probable = world.ask(2, return_log_probs=True, top_log_probs=2, prompt_log_probs=True)
    failed = world.ask(9, inject="error", inject_after=3)
    stopped = world.ask(9, stop_words=((12, 13),))
    resumed = world.ask(9, made=expected_tokens(5))
    adapted = world.ask(9, adapter="sql")
    world.run()
    prompt, first, second = (event for _, event in world.events[probable])
    assert (prompt.of_prompt, prompt.token_ids, prompt.log_probs[:3]) == (
        True,
        [2] * 3,
        [-1, -1, -2],
    )
    assert (first.log_probs, first.alternatives) == ([0, 0, -1], [10, 11])
    assert second.finish == "length"
    assert world.ids(failed) == expected_tokens(3)
    assert isinstance(world.last(failed).error, TritonUnknownError)
    assert (world.ids(stopped), world.last(stopped).finish) == (expected_tokens(2), "stop")
    assert world.ids(resumed) == expected_tokens(9)[5:]
    assert world.ids(adapted) == expected_tokens(11)[2:]
    with pytest.raises(InvalidArgument, match="lora_name='sqk': no such adapter; did you"):
        world.ask(adapter="sqk")


def test_kv_cache_use_is_that_of_prompts_and_tokens_in_slots() -> None:
    world = World(tps=100, max_batch_size=2)
    assert world.engine.kv_cache() == KVCacheStats(0, 32, 128)
    asked = [world.ask(100, prompt=31) for _ in range(3)]
    assert world.engine.kv_cache().usage == 2 * 1 / 128  # the third waits
    world.run(seconds=0.025)
    assert world.engine.kv_cache().usage == 2 * 2 / 128
    for handle in asked:
        world.engine.cancel(handle)
    assert world.engine.kv_cache().usage == 0


def test_a_hanging_engine_sends_nothing() -> None:
    world = World(tps=0)
    other = world.ask(FOREVER, tps=1.0)
    hanging = world.ask(5, inject="hang", inject_after=2)
    world.run()
    assert world.ids(hanging) == expected_tokens(2)
    later = world.ask(1)
    world.engine.cancel(other)
    assert world.engine.wait_s() is None
    assert world.engine.step() == []
    assert not world.events[other]
    assert not world.events[later]
