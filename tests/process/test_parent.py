"""The parent: it restarts a server and Cog, and ends with all; the server is a stand-in."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import scripted_parent
from process_trees import running, until

from cog_triton.processes.child import cpu_time
from cog_triton.system import reaper

READY = "link.send(Ready('up'))"
FAILS = "link.send(NotReady(TritonStartFailed('no'), {}))"
EXITS = "os._exit(3)"
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN) and 1"
TRITON = "link.triton.start(StartTriton(['sleep', '600'], dict(os.environ), 15, '', 'log', 'off'))"
COG = "echo $PORT > port; echo $$ >> cogs; exec sleep 600"
GIVEN_UP = "given up after 1 restarts in a row (TRITON_MAX_RESTARTS): "


class Started:
    """A parent in a process of its own; see scripted_parent.py."""

    def __init__(self, directory: Path, script: str = READY, **given: Any) -> None:
        """`given` are Cog's command, whether it `stays`, restarts, and constants of the parent."""
        self._mark = f"PARENT_{secrets.token_hex(8)}"
        self._directory = directory
        restarts = given.pop("restarts", 9)
        settings = {"work_dir": ".", "drain_timeout": 0, "triton_max_restarts": restarts}
        own = {"cog": given.pop("cog", ""), "stays": given.pop("stays", False)}
        own |= {"constants": {"_EXIT_S": 600, "_LOSS_S": 600, "STABLE_S": 600, **given}}
        arguments = json.dumps({"script": script, "settings": settings, **own})
        places = [str(Path(scripted_parent.__file__).parent), os.environ.get("PYTHONPATH", "")]
        with (directory / "errors").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scripted_parent", arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(places), self._mark: "1"},
                cwd=directory,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._port = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def answers(self, expression: str) -> Iterator[Any]:
        """The server's value of it, once there is a server, until it hangs up."""
        with socket.create_connection(("127.0.0.1", self._port), 60) as connection:
            connection.sendall(expression.encode() + b"\n")
            with connection.makefile() as lines:
                yield from map(json.loads, lines)

    def ask(self, expression: str = "os.getpid()") -> Any:
        """As `answers`, of the next server if one hangs up without an answer."""
        while True:
            with suppress(ConnectionResetError, StopIteration):
                return next(self.answers(expression))

    def cogs(self, count: int = 1) -> list[int]:
        """Processes of all Cogs, once there are so many."""
        path = self._directory / "cogs"
        until(lambda: path.exists() and path.read_text().count("\n") >= count, "Cog")
        return [int(word) for word in path.read_text().split()]

    @property
    def errors(self) -> str:
        return (self._directory / "errors").read_text()

    def end(self, number: int = 0) -> int:
        """Wait for its end, after a signal; the exit code."""
        if number:
            self.process.send_signal(number)
        code = self.process.wait(60)
        assert code < 0 or not reaper.marked(self._mark)
        until(lambda: not reaper.marked(self._mark), "nothing is left")
        return code


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Started] = []

    def start(*args: Any, **given: Any) -> Started:
        made.append(Started(tmp_path, *args, **given))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize(
    ("order", "reason", "end"),
    [
        ("os.kill(os.getpid(), 9)", "the server was killed by SIGKILL", signal.SIGTERM),
        ("os.kill(os.getpid(), 19)", "process {} of the server was stopped", signal.SIGINT),
        ("(due.set(0), signal.pause())", "the server's process ({}) hangs: ", signal.SIGKILL),
    ],
    ids=["killed", "stopped", "hangs"],
)
def test_a_server_is_replaced_and_the_rest_stays(
    order: str, reason: str, end: int, start: Start
) -> None:
    parent = start(cog=COG)
    pid, cogs = parent.ask(), parent.cogs()
    parent.ask(TRITON)
    triton = parent.ask("link.triton.root_pid")
    stream = parent.answers("os.getpid()")
    assert next(stream) == pid
    next(parent.answers(order), None)
    assert list(stream) == [], "it was cut"
    standing = parent.ask("[link.triton.root_pid, link.triton.standing.argv]")
    assert standing == [triton, ["sleep", "600"]]
    assert parent.ask() != pid
    assert (running(pid, triton), parent.cogs()) == ({triton}, cogs)
    assert reason.format(pid) in parent.errors
    assert parent.errors.count("; it is started again") == 1
    assert parent.end(end) == (-end if end == signal.SIGKILL else 0)
    assert [*iter(parent.line, "")] == ["up True\n", "stops\n"][: 1 if end == signal.SIGKILL else 2]


def test_one_that_is_late_and_computes_stays_and_its_end_ends_all(start: Start) -> None:
    parent = start(cog=COG)
    late = "[due.set(0), sum(range(3 * 10**7)), due.set(float('inf')), os.getpid()][-1]"
    assert parent.ask() == parent.ask(late)
    assert not [*parent.answers("os._exit(0)")]
    assert parent.end() == 0


def test_a_server_that_fails_again_and_again_is_given_up_unless_it_was_stable(start: Start) -> None:
    parent = start(restarts=1, STABLE_S=0)
    for _ in range(3):
        assert not [*parent.answers(EXITS)]
    assert parent.ask()
    parent = start(restarts=1)
    for _ in range(2):
        assert not [*parent.answers(EXITS)]
    assert parent.end() == 1
    assert f"E2106 TritonStartFailed: {GIVEN_UP}the server exited with 3\n" in parent.errors


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (EXITS, "the server exited with 3 during start-up"),
        (FAILS.format(False), "no"),
        (f"[{READY}, {FAILS.format(True)}, {EXITS}]", "no"),
    ],
    ids=["exits", "fails", "ends"],
)
def test_a_start_that_fails_ends_all(script: str, said: str, start: Start) -> None:
    parent = start(script, cog=COG)
    assert parent.end() == 1
    assert parent.errors == f"E2106 TritonStartFailed: {said}\n"


def test_a_server_whose_start_has_failed_may_stay_but_not_in_place_of_another(start: Start) -> None:
    parent = start(FAILS.format(False), stays=True)
    pid = parent.ask(IGNORES) and parent.ask()
    parent.ask("link.stop_cog()")  # answered after the failure was taken
    assert parent.ask() == pid
    parent.ask(READY)
    assert [*parent.answers(FAILS.format(False))] in ([], [None])
    assert parent.ask() != pid
    assert "E2106 TritonStartFailed: no; it is started again\n" in parent.errors
    assert parent.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(("patience", "second"), [("_EXIT_S", 0), ("_HURRY_S", signal.SIGINT)])
def test_a_server_that_ignores_sigterm_is_killed(patience: str, second: int, start: Start) -> None:
    parent = start(cog=COG, **{patience: 0.1})
    parent.ask(IGNORES)
    parent.process.terminate()
    assert [parent.line(), parent.line()] == ["up True\n", "stops\n"]
    assert parent.end(second) == 0


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "Cog was killed by SIGKILL"), (signal.SIGSTOP, "process {} of Cog was stop")],
)
def test_cog_is_replaced_beside_the_server(number: int, said: str, start: Start) -> None:
    parent = start(cog=COG)
    pid, (cog,) = parent.ask(), parent.cogs()
    os.kill(cog, number)
    assert len(parent.cogs(2)) == 2
    assert said.format(cog) in parent.errors
    assert parent.ask() == pid
    assert parent.ask("private") == f"PORT={(parent._directory / 'port').read_text().strip()}"


@pytest.mark.parametrize(
    ("cog", "late", "reason"),
    [(COG, 2, "late"), ("echo $$ >> cogs; while :; do :; done", 3, "wrong")],
    ids=["late and asleep", "late and computes"],
)
def test_a_cog_that_fails_is_replaced(cog: str, late: int, reason: str, start: Start) -> None:
    parent = start(cog=cog)
    (pid,) = parent.cogs()
    until(lambda: cog != COG or Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "sleep")
    for _ in range(late):
        parent.ask("link.send(RestartCog('it is late', True))")
        before = cpu_time(pid)
        until(lambda ticks=before: cog == COG or cpu_time(pid) > ticks + 1, "CPU time")
    parent.ask("link.send(RestartCog('it is wrong', False))")
    parent.cogs(2)
    assert parent.errors == f"it is {reason}; it is started again\n"


def test_cog_is_stopped_for_good_with_an_orphan_of_it(start: Start) -> None:
    cog = f"trap '' TERM; (sleep 600 & echo $! >> cogs); {COG}"
    parent = start(cog=cog, _COG_EXIT_S=0.1, _TIDY_S=0.01)
    pids = parent.cogs(2)
    orphan = Path(f"/proc/{pids[0]}/stat")
    assert int(orphan.read_text().split()[3]) == parent.process.pid
    parent.ask("link.stop_cog()")
    assert not any(map(running, pids))
    until(lambda: not orphan.exists(), "it is no zombie")
    assert parent.cogs() == pids


def test_a_cog_that_fails_again_and_again_ends_all(start: Start) -> None:
    parent = start(cog="exit 3", restarts=1, _LOSS_S=0.1)
    assert parent.end() == 1
    assert f"E2105 TritonUnavailable: {GIVEN_UP}Cog exited with 3; stopping\n" in parent.errors
