"""Free ports for servers that tests and benchmarks start, and those that are listened on."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.system import ports
from cog_triton.system.ports import free_ports, listening_sockets


def test_free_ports_are_distinct_and_free_and_below_the_ephemeral_range() -> None:
    found = free_ports(20) + free_ports(20)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(found)) == 40
    for port in found:
        assert port < first
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


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
