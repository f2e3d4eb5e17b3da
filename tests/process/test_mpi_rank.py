"""MPI rank wrapper: exit codes and signals of one rank under mpirun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_trees import running, until, written

from cog_triton.triton import mpi_rank

PATIENCE_S = 60
PROGRAM = [sys.executable, "-S", "-I", str(mpi_rank.__file__)]
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def run(script: str, number: int = 0) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*PROGRAM, "sh", "-c", script],
            cwd=tmp_path,
            env={**os.environ, "OMPI_COMM_WORLD_RANK": str(number)},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("script", "code", "reported"),
    [("exit 0", 1, 0), ("exit 3", 3, 3), ("kill -9 $$", 137, 137)],
)
def test_an_exit_that_nobody_asked_for_is_a_failure(
    start: Start, script: str, code: int, reported: int
) -> None:
    process = start(script, 1)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert said.decode() == f"rank 1: tritonserver exited with code {reported}\n"


@pytest.mark.parametrize(
    ("variable", "rank", "code"),
    [
        ("OMPI_COMM_WORLD_RANK", "17", 17),
        ("PMIX_RANK", "3", 3),
        ("PMIX_RANK", "0", 2),  # sh does not know {rank} itself
        ("UNSET", "0", 1),
    ],
)
def test_a_rank_picks_its_command_by_its_number(variable: str, rank: str, code: int) -> None:
    words = ["sh", "-c", "exit {rank}", "--other-ranks", "sh", "-c", "exit {rank}"]
    done = subprocess.run([*PROGRAM, *words], env={variable: rank}, capture_output=True, text=True)
    assert done.returncode == code
    name = "no OMPI_COMM_WORLD_RANK" if variable == "UNSET" else f"rank {rank}: "
    assert name in done.stderr


def test_sigusr1_stops_rank_0_gracefully(start: Start, tmp_path: Path) -> None:
    process = start("trap 'exit 7' TERM; echo up > up; while :; do sleep 0.05; done")
    written(tmp_path / "up")
    os.killpg(process.pid, signal.SIGUSR1)  # as mpirun does: to the whole group
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.full
def test_other_ranks_wait_for_rank_0_and_stop_after_the_leader_timeout(
    start: Start, tmp_path: Path
) -> None:
    process = start("echo up > up; while :; do sleep 0.05; done", 1)
    written(tmp_path / "up")
    os.killpg(process.pid, signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert process.wait(PATIENCE_S) == 0


def test_a_signal_before_the_start_is_not_lost(start: Start) -> None:
    """From the first moment: until our handler is there, the signal itself ends the rank."""
    for delay in (0, 0.02, 0.05):
        process = start("exec sleep 600")
        time.sleep(delay)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE_S) in (0, -signal.SIGUSR1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_tritonserver_ends_with_its_rank(
    number: int, code: int, start: Start, tmp_path: Path
) -> None:
    process = start("echo $$ > pid; exec sleep 600", 1)
    pid = int(written(tmp_path / "pid"))
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == code
    until(lambda: not running(pid), "tritonserver ends")
