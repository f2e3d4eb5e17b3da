"""Mock engine: steps bring every token of every stream, and stop for good when asked to."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from mock_requests import MODEL, expected_tokens, request

from cog_triton.engines.adapter_registry import AdapterRegistry, RegisteredAdapter
from cog_triton.engines.mock import mock_directory
from cog_triton.engines.mock.engine import MockEngine
from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import InvalidArgument, TritonUnknownError

FOREVER = 9000
HANDLES = itertools.count(1)


class World:
    """An engine, its clock, and what came of each stream."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self.engine = MockEngine(MODEL, MockOptions(**options), lambda: self.now)
        self.events: dict[int, list[TokenEvent]] = defaultdict(list)
        self.steps: list[list[int]] = []

    def ask(self, **values: Any) -> int:
        handle = next(HANDLES)
        self.engine.submit(handle, request(**values))
        return handle

    def run(self, steps: int = 10_000, until: float = 1e9) -> None:
        """Step when the engine says so, until it waits for a request."""
        for _ in range(steps):
            wait = self.engine.wait_s()
            if wait is None or self.now + wait > until:
                return
            self.now += wait
            events = self.engine.step()
            self.steps.append([handle for handle, _ in events])
            for handle, event in events:
                self.events[handle].append(event)

    def ids(self, handle: int) -> list[int]:
        return [token for event in self.events[handle] for token in event.token_ids]

    def last(self, handle: int) -> TokenEvent:
        return self.events[handle][-1]


@pytest.mark.parametrize(
    "options", [{"tps": 0}, {"tps": 2000}, {"step_ms": 5}, {"tps": 0, "max_batch_size": 3}]
)
def test_concurrent_streams_all_send_their_whole_output(options: dict[str, Any]) -> None:
    world = World(**options)
    asked = [world.ask(max_tokens=100 + number) for number in range(32)]
    world.run()
    for number, handle in enumerate(asked):
        assert world.ids(handle) == expected_tokens(100 + number)
        assert world.last(handle).finish == "length"
    assert world.engine.wait_s() is None


def test_at_unlimited_rate_every_token_is_an_event_and_readers_set_the_pace() -> None:
    world = World(tps=0)
    handle = world.ask(max_tokens=500)
    world.run()
    assert [len(event.token_ids) for event in world.events[handle]] == [1] * 500
    assert world.engine.waits_for_readers
    assert not World(tps=1).engine.waits_for_readers
    assert not World(tps=0, step_ms=1).engine.waits_for_readers


def test_timed_wake_ups_are_shared() -> None:
    world = World(tps=100)
    for number in range(100):
        world.now = 1000 + number * 1e-5
        world.ask(max_tokens=50)
    world.run()
    assert len(world.steps) < 150


def test_cancel_ends_only_its_own_stream() -> None:
    world = World(tps=0, max_batch_size=1)
    running, waiting = world.ask(max_tokens=FOREVER), world.ask(max_tokens=2)
    world.run(3)
    world.engine.cancel(running)
    world.run()
    assert world.last(running) == TokenEvent([], [], "cancelled")
    assert world.ids(waiting) == expected_tokens(2)
    world.engine.cancel(running)
    world.engine.cancel(10**9)
    assert world.engine.wait_s() is None


def test_cancel_during_prefill_ends_the_stream_at_once() -> None:
    for options in ({}, {"step_ms": 10}):
        world = World(prefill_ms=60_000, **options)
        handle = world.ask()
        world.engine.cancel(handle)
        world.run(1, until=world.now)
        assert world.events[handle] == [TokenEvent([], [], "cancelled")]


def test_a_hanging_engine_sends_nothing() -> None:
    world = World(tps=0)
    other = world.ask(max_tokens=FOREVER, tps=1.0)
    hanging = world.ask(max_tokens=5, inject="hang", inject_after=2)
    world.run()
    assert world.ids(hanging) == expected_tokens(2)
    later = world.ask(max_tokens=1)
    world.engine.cancel(other)
    assert world.engine.wait_s() is None
    assert world.engine.step() == []
    assert not world.events[other]
    assert not world.events[later]


SCRIPT = """
import sys
from cog_triton.engines.mock.engine import MockEngine
from mock_requests import request

engine = MockEngine.from_parameters({"engine_dir": sys.argv[1], "tps": "0"})
engine.submit(1, request(9, inject="crash", inject_after=3))
while engine.wait_s() is not None:
    print(*[event.token_ids[0] for _, event in engine.step()], flush=True)
"""


def test_an_injected_crash_kills_the_process_after_the_tokens(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(mock_directory.make_engine(tmp_path))],
        cwd=Path(__file__).parent,
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    assert len(done.stdout.split()) == 3


def test_a_step_clock_advances_all_streams_together() -> None:
    world = World(step_ms=10, tps=7)
    first, second = world.ask(max_tokens=5), world.ask(max_tokens=3)
    world.run(1)
    world.now += 0.004
    third = world.ask(max_tokens=2, tps=1000.0)
    world.run()
    together = [first, second]
    assert world.steps == [together, [*together, third], [*together, third], [first], [first]]
    assert world.now == pytest.approx(1000.05)
    assert world.ids(third) == expected_tokens(2)


def test_a_step_clock_has_prefill_and_slots() -> None:
    world = World(step_ms=10, prefill_ms=5, max_batch_size=1)
    long, queued = world.ask(max_tokens=2, prompt=9), world.ask(max_tokens=1, prompt=1)
    world.run()
    assert [made for made in world.steps if made] == [[long], [long], [queued]]
    assert world.now == pytest.approx(1000.07)


def test_a_late_step_clock_catches_up_one_token_at_a_time() -> None:
    world = World(step_ms=10)
    handle = world.ask(max_tokens=40)
    world.now += 0.055
    world.run(until=world.now + 1e-6)
    assert world.ids(handle) == expected_tokens(5)
    assert {len(event.token_ids) for event in world.events[handle]} == {1}
    world.now += 60
    begin = world.now
    world.run(until=begin + 1e-6)
    assert len(world.ids(handle)) < 40
    world.run()
    assert world.ids(handle) == expected_tokens(40)


def test_a_step_clock_keeps_what_requests_ask_for() -> None:
    world = World(step_ms=10)
    grouped = world.ask(max_tokens=5, tokens_per_response=2)
    probable = world.ask(max_tokens=2, return_log_probs=True)
    failed = world.ask(max_tokens=9, inject="error", inject_after=3)
    stopped = world.ask(max_tokens=9, stop_words=((12, 13),))
    world.run()
    assert [len(event.token_ids) for event in world.events[grouped]] == [2, 2, 1]
    assert [event.log_probs for event in world.events[probable]] == [[0.0], [0.0]]
    assert world.ids(failed) == expected_tokens(3)
    assert isinstance(world.last(failed).error, TritonUnknownError)
    assert (world.ids(stopped), world.last(stopped).finish) == (expected_tokens(2), "stop")


def test_rate_of_a_stream() -> None:
    assert MockOptions(tps=7).rate() == 7
    assert MockOptions(tps=7).rate(0) == 0
    assert MockOptions(tps=7, step_ms=10, tokens_per_response=2).rate(3) == 200


def test_with_an_adapter_the_text_begins_as_many_tokens_later_as_its_rank_is(
    tmp_path: Path,
) -> None:
    registry = AdapterRegistry(tmp_path / "registry.json")
    registry.write([RegisteredAdapter("sql", 1, tmp_path, 2, "sql")])
    for options in ({"tps": 0}, {"step_ms": 10.0}):
        world = World(**options)
        world.engine._registry = registry
        plain, adapted = world.ask(max_tokens=9), world.ask(max_tokens=9, adapter="sql")
        stopped = world.ask(max_tokens=9, adapter="sql", stop_words=((15, 16),))
        world.run()
        assert world.ids(plain) == expected_tokens(9)
        assert world.ids(adapted) == expected_tokens(11)[2:]
        assert world.ids(stopped) == [12, 13, 14]
        with pytest.raises(InvalidArgument, match="lora_name='sqk': no such adapter; did you"):
            world.ask(adapter="sqk")
