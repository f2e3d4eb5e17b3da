"""TCP sockets that listen, by the kernel's filter and by its table."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from cog_triton.system import tcp_sockets as module
from cog_triton.system.tcp_sockets import listening_sockets


@pytest.fixture(params=["sock_diag", "proc"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Iterator[tuple[int, int]]:
        raise OSError("there is no such way")

    other = {"sock_diag": "_of_proc", "proc": "_diagnosed"}[request.param]
    monkeypatch.setattr(module, other, fail)


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::1", "::"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        made = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip("no IPv6 here")
    with made:
        yield made


def inode_of(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def test_a_listening_socket_is_found_until_it_is_closed(listener: socket.socket) -> None:
    address = listener.getsockname()
    port = address[1]
    own = (port, inode_of(listener))
    assert own in list(listening_sockets())
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])
    with socket.create_connection((host, port)), listener.accept()[0]:
        assert list(listening_sockets(port)) == [own]
        listener.close()
        assert not list(listening_sockets(port)), "a connection is left"


def test_a_request_that_the_kernel_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_filter", lambda port: struct.pack("=HHI", 8, 1, 0xFFFF))
    with pytest.raises(OSError):
        list(module._diagnosed(socket.AF_INET, None))
