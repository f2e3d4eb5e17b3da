"""Engine replicas: shares of the GPUs, engines leased side by side, and one that dies."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from started_keeper import PATIENCE_S, Keeper, keeping, until
from step_engines import ENGINE

from cog_triton.engines.engine_client import EngineClient, leased_engines
from cog_triton.engines.engine_connectors import GuestConnector
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.errors import EngineCorrupt, EngineIncompatible, TritonUnavailable
from cog_triton.keeper.engine_lease import locate_engine
from cog_triton.keeper.keeper_client import EngineReplicas, share_gpus
from cog_triton.keeper.keeper_messages import EngineSpec
from cog_triton.text.sampling import SamplingParams

FOREVER = 10**9
HANDLES = itertools.count(1)


@pytest.mark.parametrize(
    ("count", "needed", "environment", "shares"),
    [
        (2, 1, {}, ["0", "1"]),
        (2, 2, {}, ["0,1", "2,3"]),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),
        (2, 2, {"CUDA_VISIBLE_DEVICES": "GPU-a, MIG-b,2,3,4"}, ["GPU-a,MIG-b", "2,3"]),
        (3, 0, {}, []),
        (1, 4, {}, []),
    ],
)  # fmt: skip
def test_gpus_are_shared_out_in_their_order(
    count: int, needed: int, environment: Mapping[str, str], shares: list[str]
) -> None:
    found = share_gpus(count, needed, environment, lambda: 4)
    assert (found.count, list(found.gpus)) == (count, shares)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, r"ENGINE_REPLICAS=3: needs 6 GPUs, 2 for each engine; this machine has 4"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, r"; CUDA_VISIBLE_DEVICES=0,1 has 2"),
        ({"CUDA_VISIBLE_DEVICES": ""}, r"; CUDA_VISIBLE_DEVICES= has 0"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,0,1,2"}, r"=0,1,2,0,1,2 has 3"),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2,3,4,5"}, r"=0,-1,2,3,4,5 has 1"),
    ],
)
def test_too_few_gpus_are_e1305(environment: Mapping[str, str], said: str) -> None:
    with pytest.raises(EngineIncompatible, match=said):
        share_gpus(3, 2, environment, lambda: 4)


def test_without_any_gpu_the_engine_says_what_it_lacks() -> None:
    assert share_gpus(2, 1, {}, lambda: 0) == EngineReplicas(2)


def test_caches_of_several_engines_are_told_as_one() -> None:
    one, other = KVCacheStats(0.5, 16, 100, 10, 4), KVCacheStats(0.25, 16, 300, 30, 6)
    assert KVCacheStats.of_engines([one, other]) == KVCacheStats(125 / 400, 16, 400, 40, 10)
    assert KVCacheStats.of_engines([]) is None
    unknown = KVCacheStats.of_engines([KVCacheStats(0.5), KVCacheStats(0.1)])
    assert unknown == KVCacheStats(0.3)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    with keeping(tmp_path, replicas=EngineReplicas(2, ("5", "6,7"))) as keeper:
        yield keeper


class Engines:
    """Two engines, and what their requests got."""

    def __init__(self, keeper: Keeper, **parameters: str) -> None:
        self.keeper = keeper
        values = {"max_batch_size": "4", **parameters}
        self.engine = leased_engines(
            keeper.client.name, EngineSpec.of(ENGINE, values), owner=0, count=2
        )

    def gpus(self) -> dict[int, str]:
        """CUDA_VISIBLE_DEVICES of each engine process."""
        found = {}
        for pid in self.keeper.pids:
            process = Path(f"/proc/{pid}")
            try:
                line = (process / "cmdline").read_bytes()
                variables = (process / "environ").read_text()
            except OSError:  # it has just ended
                continue
            if b"engine_process" not in line or b"reaper" in line:
                continue
            for item in variables.split("\0"):
                name, _, value = item.partition("=")
                if name == "CUDA_VISIBLE_DEVICES":
                    found[pid] = value
        return found

    def submit(self, first: int, count: int) -> queue.Queue[TokenEvent]:
        events: queue.Queue[TokenEvent] = queue.Queue()
        request = EngineRequest(input_ids=[first], sampling=SamplingParams(max_tokens=count))
        self.engine.submit(next(HANDLES), request, events.put)
        return events


def test_each_engine_has_its_gpus_and_a_dead_one_is_replaced_there(keeper: Keeper) -> None:
    engines = Engines(keeper)
    try:
        before = engines.gpus()
        assert sorted(before.values()) == ["5", "6,7"]
        running = [engines.submit(1, FOREVER), engines.submit(1, FOREVER)]
        for events in running:
            assert events.get(timeout=PATIENCE_S).error is None
        assert engines.engine.stats().active == 2
        victim = next(pid for pid, gpus in before.items() if gpus == "6,7")
        os.kill(victim, signal.SIGKILL)
        death = keeper.run(keeper.client.wait_for_death())
        assert death.serving == 1  # type: ignore[attr-defined]
        until(lambda: engines.engine.stats().active < 2)
        left = [events for events in running if _goes_on(events)]
        assert len(left) == 1, "only its own requests end"
        for _ in range(4):  # none goes to the dead one, nor to its successor too early
            assert engines.submit(1, 2).get(timeout=PATIENCE_S).error is None
        until(lambda: len(engines.gpus()) == keeper.client.serving == 2)
        assert sorted(engines.gpus().values()) == ["5", "6,7"]
        assert victim not in engines.gpus()
    finally:
        engines.engine.close()


def _goes_on(events: queue.Queue[TokenEvent]) -> bool:
    """Whether a request still gets tokens, rather than E2105."""
    while not events.empty():
        if (event := events.get_nowait()).error is not None:
            assert isinstance(event.error, TritonUnavailable)
            return False
    return events.get(timeout=PATIENCE_S).error is None


def test_guests_use_all_engines_and_ask_each(keeper: Keeper) -> None:
    engines = Engines(keeper)
    name = keeper.client.name
    locates = [lambda n=n: locate_engine(name, 0, n) for n in range(2)]  # type: ignore[misc]
    guests = EngineClient([GuestConnector(locate) for locate in locates], "tokens")
    guests.start()
    try:
        until(lambda: len(guests.loads()) == 2)
        request = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=FOREVER))
        for handle in (1, 2):
            guests.submit(handle, request, lambda event: None)
        assert guests.loads() == {0: 1, 1: 1}
        answers: list[Mapping[int, TokenEvent]] = []
        answered = threading.Event()
        short = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=1))
        guests.ask_all(3, short, lambda found: (answers.append(found), answered.set()))
        assert answered.wait(PATIENCE_S)
        assert sorted(answers[0]) == [0, 1]
    finally:
        guests.close()
        engines.engine.close()


def test_engines_that_do_not_load_are_told(keeper: Keeper) -> None:
    with pytest.raises(EngineCorrupt, match=r"x\.bin: torn in two"):
        Engines(keeper, corrupt="x.bin")


def test_one_that_does_not_come_back_is_tried_again_while_the_other_serves(
    keeper: Keeper, tmp_path: Path
) -> None:
    blocked = tmp_path / "pid"
    engines = Engines(keeper, pid_file=str(blocked))
    try:
        victim = next(iter(engines.gpus()))
        blocked.unlink()
        blocked.mkdir()  # so that the next one cannot write it
        os.kill(victim, signal.SIGKILL)
        logs = tmp_path.glob
        until(lambda: any("IsADirectoryError" in log.read_text() for log in logs("e*.log")))
        assert engines.submit(1, 1).get(timeout=PATIENCE_S).error is None
        blocked.rmdir()
        until(lambda: keeper.client.serving == 2)
    finally:
        engines.engine.close()
