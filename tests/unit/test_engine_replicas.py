"""Engine replicas: shares of the GPUs, engines side by side, and one that dies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from stack import wait_until as until
from started_fleet import StartedFleet, started
from step_engines import ENGINE
from vllm_hosts import HANDLES, Inbox, ask, tokens

from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.errors import EngineIncompatible, TritonUnavailable
from cog_triton.processes import engine_fleet
from cog_triton.processes.engine_child import EngineChild
from cog_triton.system.gpus import EngineReplicas, share_gpus


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


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StartedFleet]:
    # Of a Python of its own, whose environment is made of the given one.
    parameters = {"max_batch_size": "4", "pid_file": str(tmp_path / "pid")}
    spec = EngineSpec.of(ENGINE, {**parameters, "engine_python": sys.executable})
    with started(tmp_path, spec, count=2, gpus=("5", "6,7")) as fleet:
        until(lambda: len(fleet.client.loads()) == 2)
        yield fleet


def gpus(fleet: StartedFleet, replica: int) -> str:
    variables = Path(f"/proc/{fleet.pid(replica)}/environ").read_text().split("\0")
    (found,) = (one for one in variables if one.startswith("CUDA_VISIBLE_DEVICES="))
    return found.partition("=")[2]


def test_each_engine_has_its_gpus_and_a_dead_one_is_replaced_there(fleet: StartedFleet) -> None:
    assert [gpus(fleet, replica) for replica in range(2)] == ["5", "6,7"]
    assert len(fleet.pids) == 2
    running = {next(HANDLES): Inbox() for _ in range(2)}
    for handle, inbox in running.items():
        fleet.client.submit(handle, tokens([1], 10**9), inbox)
    assert fleet.client.loads() == {0: 1, 1: 1}
    fleet.call(fleet.engines.end, "it fails every request", 1)
    death = fleet.death()
    assert (death.reason, death.replica, death.serving) == ("it fails every request", 1, 1)
    until(lambda: fleet.client.loads() == {0: 1})
    for handle in running:
        fleet.client.cancel(handle)
    ends = [inbox.until_end()[-1] for inbox in running.values()]
    assert [end.finish for end in ends if end.error is None] == ["cancelled"]
    assert [type(end.error) for end in ends if end.error is not None] == [TritonUnavailable]
    for _ in range(4):  # none goes to the dead one, nor to its successor too early
        assert ask(fleet.client, tokens([1], 2))[-1].error is None
    until(lambda: len(fleet.client.loads()) == 2)
    assert [gpus(fleet, replica) for replica in range(2)] == ["5", "6,7"]
    assert fleet.run(fleet.engines.wait_until_serving()) == {0: 1, 1: 2}


def test_one_that_does_not_come_back_is_tried_again_while_the_other_serves(
    fleet: StartedFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "pid"
    blocked.unlink()
    blocked.mkdir()  # so that the next one cannot write it
    os.kill(fleet.pid(0), signal.SIGKILL)
    assert fleet.death().serving == 1
    until(lambda: caplog.text.count("engine 0 is not back, and is tried again: ") > 1)
    assert "IsADirectoryError" in caplog.text
    assert ask(fleet.client, tokens([1], 1))[-1].error is None
    blocked.rmdir()
    until(lambda: fleet.engines.serving == 2)
    assert not fleet.engines.has_died
    assert fleet.engines._failure.empty()


def test_one_that_does_not_load_at_first_is_a_failure_whoever_else_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pid")  # which nobody reads
    parameters = {"max_batch_size": "4", "pid_file": str(tmp_path / "pid")}
    fast, slow = EngineSpec.of(ENGINE, {"max_batch_size": "4"}), EngineSpec.of(ENGINE, parameters)

    def child(number: int, spec: EngineSpec, *args: Any) -> EngineChild:
        return EngineChild(number, slow if args[-1] == "1" else spec, *args)

    monkeypatch.setattr(engine_fleet, "EngineChild", child)
    with started(tmp_path, fast, count=2, gpus=("0", "1")) as fleet:
        fleet.serving(0)
        os.kill(fleet.other().process.pid, signal.SIGKILL)
        assert fleet.run(fleet.engines.wait_until_failed()).startswith("the engine did not load: ")
        death = fleet.death()
        assert (death.replica, death.serving, death.lasted) == (1, 1, None)
