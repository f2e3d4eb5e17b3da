"""Free ports for servers that tests and benchmarks start."""

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.system import ports
from cog_triton.system.ports import free_ports


def test_free_ports_are_distinct_and_free_and_below_the_ephemeral_range() -> None:
    found = free_ports(20) + free_ports(20)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(found)) == 40
    for port in found:
        assert port < first
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


def test_a_taken_port_is_skipped() -> None:
    (before,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", before + 1))
        assert free_ports(1) != [before + 1]


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
