"""Public sockets: bound together, and passed to the server alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from process_trees import started as started  # a fixture

from cog_triton.errors import InvalidArgument
from cog_triton.processes.public_sockets import bound, received
from cog_triton.system.ports import free_ports, refusal

HOST = "127.0.0.1"
PATIENCE_S = 60


@pytest.fixture
def sockets() -> Iterator[dict[str, socket.socket]]:
    ports = free_ports(2)
    with bound({"PORT": (HOST, ports[0]), "OPENAI_PORT": (HOST, ports[1])}) as made:
        yield made


def test_none_is_bound_if_one_cannot_be(sockets: dict[str, socket.socket]) -> None:
    (free,) = free_ports(1)
    taken = sockets["PORT"].getsockname()[1]
    both = bound({"PORT": (HOST, free), "OPENAI_PORT": (HOST, taken)})
    with pytest.raises(InvalidArgument, match=f"OPENAI_PORT={taken}: cannot listen"):
        both.__enter__()
    assert refusal(HOST, free) is None


def test_no_process_of_the_server_inherits_them(sockets: dict[str, socket.socket]) -> None:
    copy = os.dup(sockets["PORT"].fileno())
    os.set_inheritable(copy, True)
    with received([f"PORT={copy}"])["PORT"] as found:
        assert (found.fileno(), found.get_inheritable()) == (copy, False)
