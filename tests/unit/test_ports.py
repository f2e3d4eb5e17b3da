"""Free ports for servers that tests and benchmarks start."""

import socket
from pathlib import Path

from cog_triton.system.ports import free_ports


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(20) + free_ports(20)
    assert len(set(ports)) == 40
    for port in ports:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


def test_free_ports_are_below_the_ephemeral_range() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < first for port in free_ports(3))


def test_a_taken_port_is_skipped() -> None:
    (before,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", before + 1))
        assert free_ports(1) != [before + 1]
