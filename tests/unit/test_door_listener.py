"""The front door's listening socket when many clients come at once."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

from small_door import on_loop, until

from cog_triton.door.client_connection import Listener
from cog_triton.system.ports import bind


@on_loop
async def test_clients_of_a_burst_are_accepted_in_several_turns() -> None:
    loop = asyncio.get_running_loop()
    listening = bind("PORT", "127.0.0.1", 0, 64)
    clients = [socket.create_connection(listening.getsockname()) for _ in range(50)]
    turn, accepted = 0, list[int]()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if len(accepted) < len(clients):
            loop.call_soon(count_turns)

    class Accepted(asyncio.Protocol):
        def __init__(self) -> None:
            accepted.append(turn)

    count_turns()
    listener = Listener(listening, Accepted)
    try:
        await until(lambda: len(accepted) == len(clients))
    finally:
        listener.close()
        for client in clients:
            client.close()
    assert max(Counter(accepted).values()) <= 16
