"""Sockets and ports: who is at the other end, and which are free or listened on."""

from __future__ import annotations

import os
import random
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.system import local_socket, ports
from cog_triton.system.ports import free_ports, listening_sockets

OTHER_USER = Path(__file__).parents[1] / "other_user.py"
NOBODY = 65534
OF_A_PAIR = """
import socket
from cog_triton.system import local_socket
ends = socket.socketpair()
print([local_socket.is_same_user(end) for end in ends])
"""
CONNECT = """
import sys
from cog_triton.system import local_socket
local_socket.connect(sys.argv[1])
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def unshare(*options: str) -> list[str]:
    """A command in a user namespace that maps nobody: all users are the overflow uid in it."""
    command = ["unshare", "--user", *options]
    if (tried := run(*command, "true")).returncode:
        pytest.skip(f"no user namespaces: {tried.stderr.strip()}")
    return [*command, sys.executable, "-c"]


def test_a_peer_that_a_user_namespace_does_not_map_is_another_user() -> None:
    name = f"cog-triton-test-{secrets.token_hex(8)}"
    with local_socket.listen(name):
        done = run(*unshare(), CONNECT, name)
    assert done.returncode == 1
    assert "another user listens there" in done.stderr


def test_who_alone_reaches_its_network_may_be_nobody() -> None:
    assert run(*unshare(), OF_A_PAIR).stdout == "[False, False]\n"
    assert run(*unshare("--net"), OF_A_PAIR).stdout == "[True, True]\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_nobody_is_a_user_where_all_are_mapped() -> None:
    command = [sys.executable, str(OTHER_USER), str(NOBODY), sys.executable, "-c", OF_A_PAIR]
    assert run(*command).stdout == "[True, True]\n"


def test_no_other_process_gets_ports_of_the_same_block(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import random, sys; random.seed(7); from cog_triton.system.ports import free_ports\n"
        "print(*free_ports(3), flush=True); sys.stdin.read()"
    )
    monkeypatch.setattr(ports, "_numbers", ports._claimed())
    state = random.getstate()
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = {int(word) for word in other.stdout.readline().split()}
        random.seed(7)
        ours = set(free_ports(3))
        random.setstate(state)
        other.communicate(b"")
    assert len(theirs | ours) == 6


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_listening_socket_is_found_until_it_is_closed(host: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else 2)
    except OSError:
        pytest.skip("no IPv6 here")
    port = listener.getsockname()[1]
    own = (port, os.fstat(listener.fileno()).st_ino)
    assert own in list(listening_sockets())
    there = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    with socket.create_connection((there, port)), listener.accept()[0]:
        listener.close()
        assert own not in list(listening_sockets()), "a connection is left"
