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

from cog_triton.triton import mpi_rank

PATIENCE_S = 60


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started = []

    def run(script: str, number: int = 0) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-I", str(mpi_rank.__file__), "sh", "-c", script],
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
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def until(path: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [("exit 0", 1, 0), ("exit 3", 3, 3), ("kill -9 $$", 137, 137), ("kill -15 $$", 143, 143)],
)
def test_unrequested_exit_is_a_failure(
    start: Callable[..., subprocess.Popen[bytes]], script: str, code: int, told: int
) -> None:
    process = start(script, 1)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert said.decode() == f"rank 1: tritonserver exited with code {told}\n"


def test_a_rank_picks_its_command_by_its_number() -> None:
    words = ["sh", "-c", "exit {rank}", "--other-ranks", "sh", "-c", "exit {rank}"]

    def run(variable: str, rank: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-S", "-I", str(mpi_rank.__file__), *words],
            env={variable: rank},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr.strip().splitlines()[-1]

    for variable in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        assert run(variable, "3") == (3, "rank 3: tritonserver exited with code 3")
        assert run(variable, "17") == (17, "rank 17: tritonserver exited with code 17")
        assert run(variable, "0")[1] == "rank 0: tritonserver exited with code 2"  # {rank} itself
    assert run("UNSET", "0") == (
        1,
        "mpi_rank.py: no OMPI_COMM_WORLD_RANK: runs under Open MPI's mpirun",
    )


def test_sigusr1_stops_rank_0_gracefully(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = start("trap 'exit 7' TERM; echo up > up; while :; do sleep 0.05; done")
    until(tmp_path / "up")
    os.killpg(process.pid, signal.SIGUSR1)  # as mpirun does: to the whole group
    assert process.wait(PATIENCE_S) == 0


def test_other_ranks_wait_for_rank_0(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    body = "trap 'touch told' TERM; echo up > up; while [ ! -e leader ]; do sleep 0.05; done"
    process = start(body, 1)
    until(tmp_path / "up")
    os.killpg(process.pid, signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    (tmp_path / "leader").touch()
    assert process.wait(PATIENCE_S) == 0
    assert not (tmp_path / "told").exists()


def test_signal_before_the_start_is_not_lost(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """From the first moment on: until our handler is there, the signal itself ends the rank."""
    for delay in (0, 0.01, 0.02, 0.03, 0.05, 0.1):
        process = start("exec sleep 600")
        time.sleep(delay)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE_S) in (0, -signal.SIGUSR1)


def test_other_ranks_stop_after_the_leader_timeout(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = start("echo up > up; while :; do sleep 0.05; done", 1)
    until(tmp_path / "up")
    os.killpg(process.pid, signal.SIGUSR1)
    assert process.wait(PATIENCE_S) == 0


def test_sigterm_is_forwarded(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = start("echo up > up; exec sleep 600", 1)
    until(tmp_path / "up")
    process.terminate()
    assert process.wait(PATIENCE_S) == 143


def test_killed_rank_kills_its_tritonserver(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = start("echo $$ > pid; exec sleep 600")
    pid = int(until(tmp_path / "pid"))
    process.kill()
    deadline = time.monotonic() + PATIENCE_S
    while running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
