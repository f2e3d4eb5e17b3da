"""Cog's HTTP server as we start it: socket options, and otherwise unchanged behaviour."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cog_triton.serving.coglet.http_server import tune_listening_socket
from cog_triton.system.ports import free_ports

PATIENCE_S = 60


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def nodelay(found: socket.socket) -> int:
    return found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def accepted_nodelay(found: socket.socket) -> int:
    with socket.create_connection(found.getsockname()), found.accept()[0] as connection:
        return nodelay(connection)


def test_accepted_sockets_have_nodelay(listening: socket.socket) -> None:
    assert accepted_nodelay(listening) == 0
    tune_listening_socket(listening.getsockname()[1], PATIENCE_S)
    assert accepted_nodelay(listening) == 1
    listening.setblocking(False)
    with pytest.raises(BlockingIOError):  # it is still ours, and still open
        listening.accept()


def test_backlog_holds_a_burst_of_connections(listening: socket.socket) -> None:
    listening.listen(16)
    tune_listening_socket(listening.getsockname()[1], PATIENCE_S)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(listening.getsockname(), timeout=60))


def test_socket_that_listens_later_is_tuned(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        waiting = threading.Thread(
            target=tune_listening_socket, args=(found.getsockname()[1], PATIENCE_S), daemon=True
        )
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        assert nodelay(found) == 0
        found.listen()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
        assert accepted_nodelay(found) == 1
    assert caplog.text == ""


def test_other_sockets_are_untouched_and_a_timeout_warns(
    listening: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(1)[0]
    with socket.create_connection(listening.getsockname()) as client:
        before = open_files()
        tune_listening_socket(port, 0.05)
        assert open_files() == before
        assert nodelay(listening) == nodelay(client) == 0
    assert f"Cog did not listen on PORT={port} within 0.05 s" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "text"),
    [
        (["--help"], {}, 0, "usage: http.py "),
        (["--version"], {}, 0, "coglet (Rust) "),
        (["--hosts"], {}, 2, "unrecognized arguments: --hosts"),
        (["--host", "127.0.0.1"], {}, 1, "COG_PREDICT_TYPE_STUB environment variable is not set"),
        ([], {"PORT": "http"}, 1, "ValueError: invalid literal for int()"),
        (["--host", "127.0.0.1"], {"COG_PREDICT_TYPE_STUB": "a.py:A"}, 1, "Address already in use"),
    ],
)
def test_bad_arguments_fail_as_with_cogs_own_server(
    arguments: list[str],
    environment: dict[str, str],
    code: int,
    text: str,
    listening: socket.socket,
) -> None:
    taken = {"PORT": str(listening.getsockname()[1]), "COG_LOG_LEVEL": "error"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ours, cogs = (
        subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env={"PATH": path, **taken, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        for module in ("cog_triton.serving.coglet.http_server", "cog.server.http")
    )
    assert (ours.returncode, ours.stdout) == (cogs.returncode, cogs.stdout)
    assert ours.returncode == code, ours.stderr
    assert ours.stderr.splitlines()[-1:] == cogs.stderr.splitlines()[-1:]
    assert text in ours.stdout + ours.stderr


@pytest.mark.parametrize(
    ("terminal", "term", "colours"),
    [(True, "xterm", True), (True, "dumb", False), (True, None, False), (False, "xterm", False)],
)
def test_coglets_log_has_colours_only_where_they_are_shown(
    terminal: bool, term: str | None, colours: bool
) -> None:
    code = (
        "import os; from cog_triton.serving.coglet.server_environment import limit_colours;"
        "limit_colours(os.environ); print('NO_COLOR' in os.environ)"
    )
    unset = {name: value for name, value in os.environ.items() if name not in ("TERM", "NO_COLOR")}
    leader, follower = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**unset, **({"TERM": term} if term else {})},
            stdout=subprocess.PIPE,
            stderr=follower if terminal else subprocess.DEVNULL,
            text=True,
            check=True,
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert done.stdout.strip() == str(not colours)
