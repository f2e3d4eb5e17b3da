"""Processes moved off the GPU and back by the driver's checkpoint calls, over a double of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cuda_driver import CudaDriver, has_compiler

from cog_triton.errors import EngineNotParked, EngineNotRestored
from cog_triton.keeper.checkpoint_process import CheckpointProcess
from cog_triton.keeper.cuda_checkpoint import ProcessState

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")

WITH_CUDA = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
assert not cuda.cuInit(0)
assert not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
assert not cuda.doubleHold(ctypes.c_longlong(48 << 30 if sys.argv[1:] else 0))
for _ in iter(lambda: print("ready", flush=True) or sys.stdin.readline(), ""):
    cuda.cuCtxSynchronize()
"""
Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def start(driver: CudaDriver) -> Iterator[Start]:
    """Starts processes that have CUDA."""
    started: list[subprocess.Popen[str]] = []

    def run() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", WITH_CUDA], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def checkpoints(driver: CudaDriver) -> Iterator[CheckpointProcess]:
    with closing(CheckpointProcess()) as process:
        yield process


def states(driver: CudaDriver) -> list[str]:
    return [state for state, _ in driver.processes().values()]


def test_a_group_is_locked_before_it_is_moved_and_back_before_it_is_unlocked(
    driver: CudaDriver, start: Start, checkpoints: CheckpointProcess
) -> None:
    pids = [start().pid for _ in range(2)]
    assert set(checkpoints.states([*pids, 1])) == set(pids)  # process 1 has no CUDA
    checkpoints.checkpoint(pids)
    assert states(driver) == ["CHECKPOINTED"] * 2
    assert set(checkpoints.states(pids).values()) == {ProcessState.CHECKPOINTED}
    checkpoints.restore(pids)
    assert states(driver) == ["RUNNING"] * 2
    names = [name for name, _ in driver.calls]
    assert names == [*["lock"] * 2, *["checkpoint"] * 2, *["restore"] * 2, *["unlock"] * 2]


def test_cuda_calls_of_a_checkpointed_process_wait(
    start: Start, checkpoints: CheckpointProcess
) -> None:
    process = start()
    assert process.stdin is not None
    assert process.stdout is not None
    checkpoints.checkpoint([process.pid])
    process.stdin.write("go on\n")
    process.stdin.flush()
    checkpoints.restore([process.pid])
    assert process.stdout.readline() == "ready\n"


@pytest.mark.parametrize(("call", "moved"), [("lock", 0), ("checkpoint", 1)])
def test_what_fails_is_undone(
    call: str, moved: int, driver: CudaDriver, start: Start, checkpoints: CheckpointProcess
) -> None:
    first, last = (start().pid for _ in range(2))
    driver.fail((call, last, 600))
    with pytest.raises(EngineNotParked, match=f"process {last}: CUDA_ERROR_NOT_READY"):
        checkpoints.checkpoint([first, last])
    assert states(driver) == ["RUNNING"] * 2
    assert driver.calls.count(("restore", first)) == moved
    driver.fail()
    checkpoints.checkpoint([first, last])
    assert states(driver) == ["CHECKPOINTED"] * 2


@pytest.mark.parametrize("call", ["checkpoint", "restore"])
def test_a_group_that_cannot_be_brought_back_is_told(
    call: str, driver: CudaDriver, start: Start, checkpoints: CheckpointProcess
) -> None:
    pids = [start().pid for _ in range(2)]
    driver.fail((call, pids[1], 999))
    move = checkpoints.checkpoint
    if call == "restore":
        move(pids)
        move = checkpoints.restore
    with pytest.raises(EngineNotRestored, match=rf"{pids[1]}: (FAILED|CUDA_ERROR_UNKNOWN)"):
        move(pids)


def test_a_process_that_has_ended_is_told(start: Start, checkpoints: CheckpointProcess) -> None:
    process = start()
    checkpoints.checkpoint([process.pid])
    process.kill()
    process.wait()
    with pytest.raises(EngineNotRestored, match=f"{process.pid}: gone"):
        checkpoints.restore([process.pid])


def test_a_driver_that_never_answers_is_left(driver: CudaDriver, start: Start) -> None:
    pid = start().pid
    with closing(CheckpointProcess(timeout_s=1)) as checkpoints:
        driver.fail(("checkpoint", 0, "hang"))
        with pytest.raises(EngineNotRestored, match="has not done its checkpoint in 1 s"):
            checkpoints.checkpoint([pid])
        assert checkpoints.states([pid]) == {pid: ProcessState.LOCKED}  # by another child


def test_a_driver_before_570_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = CudaDriver(tmp_path / "old", api=12040)
    monkeypatch.setenv("LD_LIBRARY_PATH", old.environment["LD_LIBRARY_PATH"])
    with pytest.raises(EngineNotParked, match=r"one of CUDA 12\.4, .* 12\.8 \(driver 570\)"):
        CheckpointProcess()


def test_a_machine_without_driver_says_so() -> None:
    with pytest.raises(EngineNotParked, match="no driver: libcuda"):
        CheckpointProcess()
