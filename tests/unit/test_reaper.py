"""Reaper: exit codes, forwarded signals, PID 1, options, marks; seen on real processes."""

import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
from process_trees import PROGRAM, TREE, running, tree_pids, written
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


BAD = """ | --grace=-1 true | --grace=nan true | --grace=soon true | --unlink-shm=trito true |
--unlink-shm=a/b/c/d true | --parent-fd=99 true | --parent-fd=0 true | --gracious=1 true"""


@pytest.mark.parametrize("options", BAD.split("|"))
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
