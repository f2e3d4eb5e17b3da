"""Public sockets: bound together, and passed to the server alone."""

from __future__ import annotations

import os

import pytest

from cog_triton.errors import InvalidArgument
from cog_triton.system.ports import bound, free_ports, received, refusal

HOST = "127.0.0.1"


def test_none_is_bound_if_one_cannot_be() -> None:
    (free,) = free_ports(1)
    with bound({"PORT": (HOST, 0)}) as sockets:
        taken = sockets["PORT"].getsockname()[1]
        both = bound({"PORT": (HOST, free), "OPENAI_PORT": (HOST, taken)})
        with pytest.raises(InvalidArgument, match=f"OPENAI_PORT={taken}: cannot listen"):
            both.__enter__()
    assert refusal(HOST, free) is None


def test_no_process_of_the_server_inherits_them() -> None:
    with bound({"PORT": (HOST, 0)}) as sockets:
        copy = os.dup(sockets["PORT"].fileno())
    os.set_inheritable(copy, True)
    with received([f"PORT={copy}"])["PORT"] as found:
        assert (found.fileno(), found.get_inheritable()) == (copy, False)
