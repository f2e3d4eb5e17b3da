"""Reaper: exit codes, forwarded signals, PID 1 and options; seen on real processes."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_trees import PROGRAM, TREE, running, tree_pids, until, written
from process_trees import started as started  # a fixture

from cog_triton.system import reaper
from cog_triton.system.reaper import Reaped, spawn


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill $$", 143)]
)
def test_exit_code_is_the_commands(script: str, code: int, started: list[Reaped]) -> None:
    started.append(spawn(["sh", "-c", script]))
    assert started[0].wait(60) == code
    assert started[0].poll() == code


@pytest.mark.parametrize(("command", "code"), [("/nonexistent", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_start_is_named(
    command: str, code: int, started: list[Reaped], tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        started.append(spawn([command], stderr=log))
    assert started[0].wait(60) == code
    assert command in (tmp_path / "log").read_text()


def test_env_cwd_and_stdout_reach_the_command(started: list[Reaped], tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "GREETING": "hello"}
    command = ["sh", "-c", 'echo "$GREETING $(pwd)"; cat']
    started.append(spawn(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE))
    assert started[0].process.stdout is not None
    with started[0].process.stdout as out:
        assert out.read().decode() == f"hello {tmp_path}\n"
    assert started[0].wait(60) == 0


def test_descendants_are_stopped_when_the_command_ends(
    started: list[Reaped], tmp_path: Path
) -> None:
    script = TREE + "until [ -e end ]; do sleep 0.01; done; exit 5"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=0.2))
    pids = tree_pids(tmp_path)
    (tmp_path / "end").touch()
    assert started[0].wait(60) == 5
    assert not any(map(running, pids.values()))  # already: wait() is the promise


def test_the_command_outlives_the_thread_that_spawned_it(
    started: list[Reaped], tmp_path: Path
) -> None:
    beat = tmp_path / "beat"
    command = ["sh", "-c", "while :; do echo >> beat; sleep 0.01; done"]
    thread = threading.Thread(target=lambda: started.append(spawn(command, cwd=tmp_path)))
    thread.start()
    thread.join()
    written(beat)
    before = beat.stat().st_size
    until(lambda: beat.stat().st_size > before + 20, "the command goes on")
    assert started[0].poll() is None


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "USR2"])
def test_signals_are_forwarded_to_the_command_only(
    name: str, started: list[Reaped], tmp_path: Path
) -> None:
    script = f"""
        sh -c 'trap "echo > stray" {name}; echo up > other; while :; do sleep 0.01; done' &
        until [ -s other ]; do sleep 0.01; done
        trap 'sleep 0.2; [ -e stray ] && exit 8; exit 9' {name}
        echo up > up
        while :; do sleep 0.01; done"""
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=0))
    written(tmp_path / "up")
    started[0].process.send_signal(signal.Signals[f"SIG{name}"])
    assert started[0].wait(60) == 9


def test_an_idle_reaper_sleeps(started: list[Reaped], tmp_path: Path) -> None:
    started.append(spawn(["sh", "-c", "echo up > up; exec sleep 600"], cwd=tmp_path))
    written(tmp_path / "up")

    def wakeups() -> list[str]:
        status = Path(f"/proc/{started[0].process.pid}/status").read_text().splitlines()
        return [line for line in status if line.startswith("voluntary_ctxt_switches")]

    def sleeps() -> bool:
        before = wakeups()
        time.sleep(0.5)
        return wakeups() == before

    until(sleeps, "the reaper sleeps once it has started its command")


COUNT_INTERRUPTS = """
import signal, sys, time
count = 0
def on_interrupt(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, on_interrupt)
print("up", flush=True)
while not count:
    time.sleep(0.01)
time.sleep(0.3)
print("count", count, flush=True)
"""


def test_ctrl_c_at_a_terminal_reaches_the_command_once() -> None:
    try:
        master, slave = pty.openpty()
    except OSError as error:
        pytest.skip(f"no terminals here: {error}")
    command = [*PROGRAM, "--", sys.executable, "-c", COUNT_INTERRUPTS]
    with subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=slave, stdout=subprocess.PIPE, close_fds=True
    ) as process:
        os.close(slave)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        os.write(master, b"\x03")
        assert process.stdout.readline() == b"count 1\n"
        assert process.wait(60) == 0
    os.close(master)


IN_A_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]

ORPHANS_ARE_REAPED = """
import os, pathlib, subprocess, sys, time
me = os.getpid()
for _ in range(5):
    subprocess.run(["sh", "-c", "sleep 0.05 & exit 0"], check=True)
subprocess.run(["sh", "-c", "trap '' TERM; setsid sleep 600 & exit 0"], check=True)
def pids():
    return {entry.name for entry in pathlib.Path("/proc").iterdir() if entry.name.isdecimal()}
deadline = time.monotonic() + 60
while len(pids()) > 3 and time.monotonic() < deadline:
    time.sleep(0.01)
print(os.getppid(), len(pids()))
sys.exit(7)
"""


def as_pid_1(namespace: list[str], *command: str) -> subprocess.CompletedProcess[str]:
    allowed = subprocess.run([*namespace, "true"], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip(f"no PID namespaces here: {allowed.stderr.decode().strip()}")
    return subprocess.run(
        [*namespace, *PROGRAM, "--grace=0.1", "--", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_as_pid_1_orphans_are_reaped_and_stopped() -> None:
    done = as_pid_1([*IN_A_NAMESPACE, "--mount-proc"], sys.executable, "-c", ORPHANS_ARE_REAPED)
    assert (done.stdout, done.stderr) == ("1 3\n", "")  # init, the command, one sleep
    assert done.returncode == 7


def test_as_pid_1_it_needs_no_proc() -> None:
    script = "trap '' TERM; setsid sleep 600 & exit 7"
    assert as_pid_1(IN_A_NAMESPACE, "sh", "-c", script).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no command given"),
        (["--"], "no command given"),
        (["--grace=-1", "--", "true"], "grace -1.0: need a number of seconds from 0 to 86400"),
        (["--grace=nan", "--", "true"], "grace nan"),
        (["--grace=soon", "--", "true"], "'soon'"),
        (["--unlink-shm=", "--", "true"], "shm prefix ''"),
        (["--unlink-shm=trito", "--", "true"], "shm prefix 'trito': need 6 or more"),
        (["--parent-fd=99", "--", "true"], "Bad file descriptor"),
        (["--parent-fd=0", "--", "true"], "parent fd 0 is not a pipe"),
        (["--gracious=1", "--", "true"], "--gracious=1"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], complaint: str) -> None:
    done = subprocess.run(
        [*PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert complaint in done.stderr


def test_bad_arguments_of_spawn_are_refused() -> None:
    with pytest.raises(ValueError, match="no command given"):
        spawn([])
    with pytest.raises(ValueError, match="grace inf"):
        spawn(["true"], grace=float("inf"))
    with pytest.raises(ValueError, match="shm prefix 'a/b/c/d'"):
        spawn(["true"], unlink_shm="a/b/c/d")


@given(st.text())
def test_an_accepted_prefix_names_files_of_dev_shm(prefix: str) -> None:
    with contextlib.suppress(ValueError):
        reaper._check(["true"], 0, prefix)
        assert len(prefix) >= 6
        assert (Path("/dev/shm") / prefix).resolve().parent == Path("/dev/shm")
