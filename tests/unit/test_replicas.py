"""Several engines: which gets a request, their GPUs, and the checks of each by itself."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tensorrt_llm_engines

from cog_triton.engines.engine_client import TOKENS_A_REQUEST, ReplicaChoice
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.mock import mock_directory
from cog_triton.engines.mock.family import MockFamily
from cog_triton.errors import EngineIncompatible, InvalidArgument, TritonUnknownError
from cog_triton.processes.restarts import Restarts
from cog_triton.serving import engine_preparation
from cog_triton.serving.admission import Admission
from cog_triton.serving.failure_detection import FailureDetection
from cog_triton.settings import load_settings
from cog_triton.system.gpus import EngineReplicas, share_gpus

SYSTEM = list(range(1000, 1000 + 2 * TOKENS_A_REQUEST))


def prompt(*last: int) -> list[int]:
    """A prompt that begins as others do."""
    return [*SYSTEM, *last]


def test_engines_that_are_alike_take_turns() -> None:
    choice = ReplicaChoice()
    assert [choice.choose([n], {0: 0, 1: 0, 2: 0}) for n in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_one_with_least_to_do_is_chosen() -> None:
    choice = ReplicaChoice()
    assert choice.choose([1], {0: 3, 1: 2, 2: 4}) == 1
    assert choice.choose([1], {0: 3, 2: 3.5}) == 0, "of those that are there"


def test_a_prefix_draws_a_request_as_far_as_it_is_worth() -> None:
    choice = ReplicaChoice()
    first = choice.choose(prompt(1), {0: 0, 1: 0})
    other = 1 - first
    for more in (0, 1, 1.9):
        assert choice.choose(prompt(2, 3), {first: more, other: 0}) == first
    assert choice.choose(prompt(4), {first: 2.1, other: 0}) == other
    assert choice.choose(prompt(5), {first: 0, other: 0.1}) == first, "now both have it"


def test_a_dead_engine_is_forgotten() -> None:
    choice = ReplicaChoice()
    assert choice.choose(prompt(), {0: 0, 1: 0.1}) == 0
    choice.forget(0)
    assert choice.choose(prompt(), {0: 0.1, 1: 0}) == 1


@pytest.mark.parametrize(
    ("count", "needed", "given", "shares"),
    [
        (2, 1, None, ["0", "1"]),
        (2, 2, None, ["0,1", "2,3"]),
        (2, 1, "3,1", ["3", "1"]),
        (2, 2, "GPU-a, MIG-b,2,3,4", ["GPU-a,MIG-b", "2,3"]),
        (3, 0, None, []),
        (1, 4, None, []),
        (3, 2, None, "ENGINE_REPLICAS=3: needs 6 GPUs, 2 for each engine; this machine has 4"),
        (3, 2, "", "; CUDA_VISIBLE_DEVICES= has 0"),
        (3, 2, "0,1,2,0,1,2", "; CUDA_VISIBLE_DEVICES=0,1,2,0,1,2 has 3"),
        (3, 2, "0,-1,2,3,4,5", "; CUDA_VISIBLE_DEVICES=0,-1,2,3,4,5 has 1"),
    ],
)
def test_gpus_are_shared_out_in_their_order_and_too_few_are_e1305(
    count: int, needed: int, given: str | None, shares: list[str] | str
) -> None:
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    refuses = isinstance(shares, str)
    with pytest.raises(EngineIncompatible, match=str(shares)) if refuses else nullcontext():
        found = share_gpus(count, needed, environment, lambda: 4)
        assert (found.count, list(found.gpus)) == (count, shares)
    assert share_gpus(2, 1, {}, lambda: 0) == EngineReplicas(2)  # the engine says what it lacks


def test_caches_of_several_engines_are_told_as_one() -> None:
    one, other = KVCacheStats(0.5, 16, 100, 10, 4), KVCacheStats(0.25, 16, 300, 30, 6)
    assert KVCacheStats.of_engines([one, other]) == KVCacheStats(125 / 400, 16, 400, 40, 10)
    assert KVCacheStats.of_engines([]) is None
    unknown = KVCacheStats.of_engines([KVCacheStats(0.5), KVCacheStats(0.1)])
    assert unknown == KVCacheStats(0.3)


class Streams:
    """Streams of engines, of which some fail or are silent."""

    def __init__(self, **engines: str) -> None:
        parts = enumerate(engines.values())
        self.serving = {n: SimpleNamespace(kind=kind, last_token_at=0.0) for n, kind in parts}
        self.asked: list[str] = []

    async def probe(self, transport: Any) -> None:
        self.asked.append(transport.kind)
        if transport.kind == "fails":
            raise TritonUnknownError("a CUDA error")
        if transport.kind == "dies":
            self.serving = {n: one for n, one in self.serving.items() if one is not transport}
            raise TritonUnknownError("it is gone")


def checked(streams: Streams, asks: int = 0) -> Any:
    """What the check of all engines finds; None if, after so many questions, nothing is wrong."""

    async def run() -> Any:
        unused: Any = None
        admission, several = Admission(1, resumes=True), cast(Any, streams)
        given = (unused, unused, several, streams.probe, admission, several)
        asked = FailureDetection(*given)
        asked.requested.set()
        watch = asyncio.ensure_future(asked._watch_engines())
        async with asyncio.timeout(60):
            while not watch.done() and not 0 < asks <= len(streams.asked):
                await asyncio.sleep(0.005)
        done, _ = await asyncio.wait({watch}, timeout=0.5)
        watch.cancel()
        return watch.result() if done else None

    return asyncio.run(run())


def test_an_engine_that_fails_is_found_among_those_that_are_well() -> None:
    streams = Streams(a="well", b="fails", c="well")
    found = checked(streams)
    assert (found.replica, "a CUDA error" in found.reason) == (1, True)
    assert streams.asked == ["well", "fails", "fails"]


def test_engines_that_are_well_are_left() -> None:
    streams = Streams(a="well", b="well")
    assert checked(streams, 2) is None
    assert streams.asked == ["well", "well"]


def test_engines_of_tensorrt_llm_are_refused(tmp_path: Path) -> None:
    family = tensorrt_llm_engines.family(tmp_path / "engine")
    refused = r"ENGINE_REPLICAS=2: must be 1 with a tensorrt_llm engine"
    with pytest.raises(InvalidArgument, match=refused):
        family.check_environment(load_settings(engine_replicas=2))
    family.check_environment(load_settings())
    assert engine_preparation._replicas(load_settings(), family).count == 1


def test_a_spare_beside_several_engines_is_refused(tmp_path: Path) -> None:
    family = MockFamily.open(mock_directory.make_engine(tmp_path))
    with pytest.raises(InvalidArgument, match="ENGINE_REPLICAS=2: must be 1 with "):
        engine_preparation._replicas(load_settings(engine_replicas=2, spare_engine=True), family)
    assert engine_preparation._replicas(load_settings(engine_replicas=2), family).count == 2


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
