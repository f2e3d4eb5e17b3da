"""Reaper: process trees end with their parent; seen on real processes."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.system import reaper
from cog_triton.system.reaper import Reaped, spawn

PROGRAM = [sys.executable, "-S", "-I", reaper.__file__]

# Starts a daemon (its own session, parent gone) and a process that ignores SIGTERM, then waits.
TREE = """
(setsid sh -c 'echo $$ > daemon; exec sleep 600' &)
sh -c 'trap "" TERM; echo $$ > stubborn; exec sleep 600' &
until [ -s daemon ] && [ -s stubborn ]; do sleep 0.01; done
echo $$ > leader
"""
TREE_NAMES = ("daemon", "stubborn", "leader")


def until(condition: Callable[[], object], what: str) -> None:
    """Give the condition, which comes about within milliseconds, ample time."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 s: {what}"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def written(path: Path) -> str:
    """The file's text once a whole line is there."""
    until(lambda: path.exists() and path.read_text().endswith("\n"), f"a line in {path}")
    return path.read_text().strip()


def tree_pids(directory: Path) -> dict[str, int]:
    pids = {name: int(written(directory / name)) for name in reversed(TREE_NAMES)}
    assert all(running(pid) for pid in pids.values())
    return pids


def all_gone(pids: dict[str, int]) -> None:
    until(lambda: not any(map(running, pids.values())), f"{pids} gone")


@pytest.fixture
def started() -> Iterator[list[Reaped]]:
    """What a test spawned; whatever is left is killed."""
    reaped: list[Reaped] = []
    yield reaped
    for one in reaped:
        one.kill()


@pytest.fixture
def shm() -> Iterator[tuple[str, list[Path]]]:
    """A prefix and three shared-memory files: two that have it and one that does not."""
    prefix = f"cog_triton_test_{os.getpid()}_"
    files = [Path("/dev/shm") / name for name in (f"{prefix}a", f"{prefix}b", f"x{prefix}")]
    for path in files:
        path.write_bytes(b"x")
    yield prefix, files
    for path in files:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill $$", 143)]
)
def test_exit_code_is_the_commands(script: str, code: int, started: list[Reaped]) -> None:
    started.append(spawn(["sh", "-c", script]))
    assert started[0].wait(20) == code
    assert started[0].poll() == code


@pytest.mark.parametrize(("command", "code"), [("/nonexistent", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_start_is_named(
    command: str, code: int, started: list[Reaped], tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        started.append(spawn([command], stderr=log))
    assert started[0].wait(20) == code
    assert command in (tmp_path / "log").read_text()


def test_env_cwd_and_stdout_reach_the_command(started: list[Reaped], tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "GREETING": "hello"}
    command = ["sh", "-c", 'echo "$GREETING $(pwd)"; cat']
    started.append(spawn(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE))
    assert started[0].process.stdout is not None
    with started[0].process.stdout as out:
        assert out.read().decode() == f"hello {tmp_path}\n"
    assert started[0].wait(20) == 0


def test_descendants_are_stopped_when_the_command_ends(
    started: list[Reaped], tmp_path: Path
) -> None:
    script = TREE + "until [ -e end ]; do sleep 0.01; done; exit 5"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=0.2))
    pids = tree_pids(tmp_path)
    (tmp_path / "end").touch()
    assert started[0].wait(20) == 5
    assert not any(map(running, pids.values()))  # already: wait() is the promise


HOLDER = """
import os, sys, threading, time
from cog_triton.system.reaper import spawn
{body}
print("ready", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holder(body: str, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that spawns things, to be killed: the parent in these tests."""
    env = {**os.environ, "PYTHONPATH": str(Path(reaper.__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(body=body)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def test_nothing_outlives_a_killed_parent(tmp_path: Path, shm: tuple[str, list[Path]]) -> None:
    prefix, files = shm
    script = TREE + "exec sleep 600"
    body = f"spawn(['sh', '-c', {script!r}], grace=0.2, unlink_shm={prefix!r})"
    with holder(body, tmp_path) as parent:
        pids = tree_pids(tmp_path)
        parent.kill()
        all_gone(pids)
    until(lambda: [path.exists() for path in files] == [False, False, True], "files unlinked")


def test_the_command_of_a_killed_parent_gets_the_grace_period(tmp_path: Path) -> None:
    script = "trap 'sleep 0.3; echo bye > bye; exit' TERM; echo up > up; sleep 600 & wait"
    with holder(f"spawn(['sh', '-c', {script!r}], grace=30)", tmp_path) as parent:
        written(tmp_path / "up")
        parent.kill()
        assert written(tmp_path / "bye") == "bye"


def test_concurrent_spawns_do_not_hold_each_others_pipe(tmp_path: Path) -> None:
    body = """
def one(number):
    spawn(["sh", "-c", f"echo $$ > {number}; exec sleep 600"], grace=0.2)
threads = [threading.Thread(target=one, args=[number]) for number in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    with holder(body, tmp_path) as parent:
        pids = {str(number): int(written(tmp_path / str(number))) for number in range(6)}
        parent.kill()
        all_gone(pids)


def test_a_forked_child_of_the_parent_does_not_hold_the_pipe(tmp_path: Path) -> None:
    body = """
spawn(["sh", "-c", "echo $$ > pid; exec sleep 600"], grace=0.2)
pid = os.fork()
if pid == 0:
    os.close(1)
    time.sleep(600)
print(pid, file=open("forked", "w"))
"""
    with holder(body, tmp_path) as parent:
        forked = int(written(tmp_path / "forked"))
        try:
            pid = int(written(tmp_path / "pid"))
            parent.kill()
            until(lambda: not running(pid), "command gone")
            assert running(forked)
        finally:
            os.kill(forked, signal.SIGKILL)


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
    assert started[0].wait(20) == 9


def test_a_second_sigterm_kills_at_once(started: list[Reaped], tmp_path: Path) -> None:
    script = TREE + "trap 'echo 1 >> asked' TERM; echo up > up; while :; do sleep 0.01; done"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=600))
    pids = tree_pids(tmp_path)
    written(tmp_path / "up")
    started[0].terminate()
    assert written(tmp_path / "asked") == "1"
    assert started[0].poll() is None
    started[0].terminate()
    assert started[0].wait(20) == 137
    assert not any(map(running, pids.values()))
    assert written(tmp_path / "asked") == "1"


def test_the_command_dies_with_a_killed_reaper(started: list[Reaped], tmp_path: Path) -> None:
    started.append(spawn(["sh", "-c", "echo $$ > pid; exec sleep 600"], cwd=tmp_path))
    pid = int(written(tmp_path / "pid"))
    os.kill(started[0].process.pid, signal.SIGKILL)
    until(lambda: not running(pid), "command gone")  # nobody has asked about it yet
    assert started[0].wait(20) == 137


@pytest.mark.parametrize("reaper_is", ["well", "stopped", "dead"])
def test_kill_works_on_a_stopped_killed_or_ended_reaper(
    reaper_is: str, started: list[Reaped], tmp_path: Path, shm: tuple[str, list[Path]]
) -> None:
    prefix, files = shm
    command = ["sh", "-c", TREE + "exec sleep 600"]
    started.append(spawn(command, cwd=tmp_path, grace=600, unlink_shm=prefix))
    pids = tree_pids(tmp_path)
    if reaper_is == "stopped":
        os.kill(started[0].process.pid, signal.SIGSTOP)
    if reaper_is == "dead":
        os.kill(started[0].process.pid, signal.SIGKILL)
        until(lambda: not running(pids["leader"]), "command gone")
        assert running(pids["daemon"])  # an orphan, in a session of its own
    started[0].kill()
    assert not any(map(running, pids.values()))
    assert started[0].poll() == 137
    assert [path.exists() for path in files] == [False, False, True]
    started[0].kill()  # once more does no harm


@pytest.mark.parametrize("how", ["killed", "asked twice"])
def test_shared_memory_of_a_killed_nested_reaper_is_removed(
    how: str, started: list[Reaped], tmp_path: Path, shm: tuple[str, list[Path]]
) -> None:
    prefix, files = shm
    within = [*PROGRAM, "--grace=600", f"--unlink-shm={prefix}", "--"]
    script = "trap '' TERM; " + TREE + "while :; do sleep 1; done"
    started.append(spawn([*within, "sh", "-c", script], cwd=tmp_path, grace=600))
    pids = tree_pids(tmp_path)
    if how == "killed":
        started[0].kill()
    else:
        started[0].terminate()
        time.sleep(0.2)  # else the two are one signal
        started[0].terminate()
        started[0].wait(20)
    assert not any(map(running, pids.values()))
    assert [path.exists() for path in files] == [False, False, True]


def test_kill_finds_descendants_that_cleared_their_environment(
    started: list[Reaped], tmp_path: Path
) -> None:
    script = "(env -i setsid sh -c 'echo $$ > pid; exec sleep 600' &); exec sleep 600"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=600))
    pid = int(written(tmp_path / "pid"))
    os.kill(started[0].process.pid, signal.SIGSTOP)
    started[0].kill()
    assert not running(pid)


def test_kill_of_one_leaves_the_others_alone(started: list[Reaped], tmp_path: Path) -> None:
    started.append(spawn(["sleep", "600"]))
    # A spawn within a spawn: the outer kill finds what the inner reaper started.
    inner = f"spawn(['sh', '-c', {TREE + 'exec sleep 600'!r}], grace=600).wait()"
    body = f"from cog_triton.system.reaper import spawn; {inner}"
    env = {**os.environ, "PYTHONPATH": str(Path(reaper.__file__).parents[2])}
    started.append(spawn([sys.executable, "-c", body], cwd=tmp_path, env=env))
    pids = tree_pids(tmp_path)
    started[1].kill()
    assert not any(map(running, pids.values()))
    assert started[0].poll() is None


def test_an_idle_reaper_sleeps(started: list[Reaped], tmp_path: Path) -> None:
    started.append(spawn(["sh", "-c", "echo up > up; exec sleep 600"], cwd=tmp_path))
    written(tmp_path / "up")

    def wakeups() -> list[str]:
        status = Path(f"/proc/{started[0].process.pid}/status").read_text().splitlines()
        return [line for line in status if line.startswith("voluntary_ctxt_switches")]

    time.sleep(0.2)
    before = wakeups()
    time.sleep(0.5)
    assert wakeups() == before


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
        assert process.wait(20) == 0
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
deadline = time.monotonic() + 20
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
        timeout=60,
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
