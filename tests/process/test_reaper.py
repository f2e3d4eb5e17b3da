"""Reaper: exit codes, signals, options and marks, and trees that end; seen on real processes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_trees import PROGRAM, TREE, running, tree_pids, until, written
from process_trees import started as started  # a fixture

from cog_triton.system import reaper
from cog_triton.system.reaper import Reaped, spawn


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["sh", "-c", "exit 3"], 3, ""),
        (["sh", "-c", "kill $$"], 143, ""),
        (["/nonexistent"], 127, "reaper: /nonexistent: No such file or directory\n"),
        (["/etc/passwd"], 126, "reaper: /etc/passwd: Permission denied\n"),
        (["sh", "-c", 'echo "$@" >&2', "sh", "--", "--grace=x"], 0, "-- --grace=x\n"),
    ],
)
def test_exit_code_is_the_commands(argv: list[str], code: int, said: str) -> None:
    done = subprocess.run([*PROGRAM, "--", *argv], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)


def test_when_the_command_ends_all_end(started: list[Reaped], tmp_path: Path) -> None:
    script = TREE + "until [ -e end ]; do sleep 0.01; done; exit 5"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=0.2))
    pids = tree_pids(tmp_path)
    assert reaper.descendants(started[0].process.pid) >= pids
    (tmp_path / "end").touch()
    assert started[0].wait(60) == 5
    assert not running(*pids)  # already: wait() is the promise


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "USR2"])
def test_signals_are_forwarded(name: str, started: list[Reaped], tmp_path: Path) -> None:
    script = f"trap 'sleep 0.1; exit 9' {name}; echo up > up; while :; do sleep 0.01; done"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=0))
    written(tmp_path / "up")
    started[0].signal(signal.Signals[f"SIG{name}"])
    assert started[0].wait(60) == 9


def test_ctrl_c_at_a_terminal_reaches_the_command_once() -> None:
    master, slave = pty.openpty()
    script = "n=0; trap 'n=$((n+1))' INT; echo up; until [ $n != 0 ]; do sleep 0.01; done"
    command = ["setsid", "--ctty", *PROGRAM, "--", "sh", "-c", f"{script}; sleep 0.3; echo $n"]
    with subprocess.Popen(command, stdin=slave, stdout=subprocess.PIPE) as process:
        os.close(slave)
        assert process.stdout.readline() == b"up\n"
        os.write(master, b"\x03")
        assert process.stdout.readline() == b"1\n"
        assert process.wait(60) == 0


def test_as_pid_1_orphans_are_reaped_and_stopped() -> None:
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*namespace, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no PID namespaces here")
    script = """
        for _ in 1 2 3; do (sleep 0.05 &); done; (trap '' TERM; setsid sleep 600 &)
        count() { set -- /proc/[0-9]*; echo $#; }
        until [ "$(count)" = 4 ]; do :; done  # init, this shell, sleep, and the shell of $(count)
        echo $PPID; exit 7"""
    command = [*namespace, *PROGRAM, "--grace=0.1", "--", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (b"1\n", b"", 7)


@pytest.mark.parametrize(
    "options",
    ["", "--grace=-1 true", "--grace=nan true", "--unlink-shm=trito true", "--parent-fd=99 true"],
)
def test_bad_options_are_refused(options: str) -> None:
    command = [*PROGRAM, *options.split()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"error: " in done.stderr


def test_a_command_line_hands_descriptors_over_and_ends_with_its_pipe(tmp_path: Path) -> None:
    (ends, alive), (reads, writes) = os.pipe(), os.pipe()
    script = f"echo $$ > pid; echo hello >&{writes}; exec {writes}>&-; exec sleep 600"
    argv = reaper.command(["bash", "-c", script], parent_fd=ends, grace=0.2, pass_fds=[writes])
    with subprocess.Popen(argv, pass_fds=[ends, writes], cwd=tmp_path) as process:
        os.close(ends)
        os.close(writes)
        with os.fdopen(reads) as read:
            assert read.read() == "hello\n"  # to the end of file: the reaper has closed its own
        pid = int(written(tmp_path / "pid"))
        assert running(pid)
        os.close(alive)
        assert process.wait(60) == 143
        assert not running(pid)


def test_marked_finds_by_a_variable(started: list[Reaped], tmp_path: Path) -> None:
    mark = f"MARK_{os.getpid()}"
    for name in (mark, f"{mark}X", f"X{mark}"):
        command, env = ["sh", "-c", f"echo $$ > {name}; exec sleep 600"], {**os.environ, name: ""}
        started.append(spawn(command, cwd=tmp_path, env=env))
        pid = int(written(tmp_path / name))
        assert (pid in reaper.marked(mark)) == (name == mark)
    started[0].kill()
    assert not reaper.marked(mark)


Names = tuple[str, Callable[[], list[bool]]]


@pytest.fixture
def shm() -> Iterator[Names]:
    """A prefix; and whether a file and a directory that have it, and another file, are there."""
    prefix = f"cog_triton_test_{os.getpid()}_"
    names = [Path("/dev/shm") / name for name in (f"{prefix}1", f"{prefix}2", f"x{prefix}")]
    names[0].mkdir()
    [path.touch() for path in names]
    yield prefix, lambda: [path.exists() for path in names]
    reaper.unlink_shm(prefix)
    names[2].unlink()


def test_nothing_outlives_a_killed_parent(tmp_path: Path, shm: Names) -> None:
    script = f"trap 'echo bye > bye; exit' TERM; {TREE} while :; do sleep 0.01; done"
    code = f"""import os, time; from cog_triton.system.reaper import spawn
spawn(['sh', '-c', {script!r}], grace=2, unlink_shm={shm[0]!r})
print(os.fork() or os.close(1) or time.sleep(60), flush=True)
time.sleep(60)"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as parent:
        pids, forked = tree_pids(tmp_path), int(parent.stdout.readline())
        parent.kill()
        until(lambda: not running(*pids) and shm[1]() == [False, False, True], "all gone")
        assert written(tmp_path / "bye") == "bye"  # SIGTERM comes first
        assert running(forked)  # which has no copy of the pipe
        os.kill(forked, signal.SIGKILL)


def test_a_second_stop_kills_at_once(started: list[Reaped], tmp_path: Path) -> None:
    script = f"trap 'echo 1 >> asked' TERM; {TREE} while :; do sleep 0.01; done"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=600))
    pids = tree_pids(tmp_path)
    started[0].terminate()
    assert written(tmp_path / "asked") == "1"
    started[0].terminate()
    assert started[0].wait(60) == 137
    assert not running(*pids)
    assert written(tmp_path / "asked") == "1"


@pytest.mark.parametrize("number", [0, signal.SIGSTOP, signal.SIGKILL])
def test_kill_works_on_a_running_stopped_or_killed_reaper(
    number: int, started: list[Reaped], tmp_path: Path, shm: Names
) -> None:
    unmarked = "(env -i setsid sh -c 'echo $$ > unmarked; exec sleep 600' &)\n" + TREE
    command = ["sh", "-c", (TREE if number == signal.SIGKILL else unmarked) + "exec sleep 600"]
    started.append(spawn(command, cwd=tmp_path, grace=600, unlink_shm=shm[0]))
    started.append(spawn(["sleep", "600"]))
    pids = tree_pids(tmp_path)
    os.kill(started[0].process.pid, number)
    if number == signal.SIGKILL:
        until(lambda: len(running(*pids)) == 2, "the command ends, the others are orphans")
        assert started[0].wait(60) == 137  # has killed them
    else:
        pids.add(int(written(tmp_path / "unmarked")))
        started[0].kill()
    assert not running(*pids)
    assert shm[1]() == [False, False, True]
    started[0].kill()  # once more does no harm
    assert (started[0].poll(), started[1].poll()) == (137, None)
