"""Who is the same user at the other end of a socket, where users look like one another."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.system import local_socket

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
