"""Guest client: a client of the engine process that is leased to a sibling stub.

Triton loads its models concurrently and is ready when all of them are, so only requests sent
before that are refused, and those that come while an engine that died is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from cog_triton.backend.engine_client import EngineClient
from cog_triton.engines.replica_choice import ReplicaChoice
from cog_triton.engines.step_items import TOKENS
from cog_triton.errors import TritonUnavailable
from cog_triton.system import local_socket

_RETRY_S = 0.02

Locate = Callable[[], str]
"""Address of the engine's socket; raises OSError or EOFError while there is none."""


class GuestConnector:
    """Connects to an engine process on a thread of its own, and again when that is `lost`."""

    def __init__(
        self, locate: Locate, hello: str, on_open: Callable[[Connection, int], None]
    ) -> None:
        """`on_open` gets each connection, and the engine's max_batch_size."""
        self._locate = locate
        self._hello = hello
        self._on_open = on_open
        self._closing = False
        self._wanted = threading.Event()
        self._wanted.set()
        self._thread = threading.Thread(target=self._run, name="connector", daemon=True)
        self._thread.start()

    def lost(self) -> None:
        """The engine has hung up: connect to the one that takes its place."""
        self._wanted.set()

    def close(self) -> None:
        """Stop connecting."""
        self._closing = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        pause = threading.Event()
        while self._wanted.wait() and not self._closing:
            try:
                connection = local_socket.connect(self._locate())
                connection.send(self._hello)
                slots = connection.recv()
            except (OSError, EOFError):
                pause.wait(_RETRY_S)
                continue
            self._wanted.clear()
            if not self._closing:
                self._on_open(connection, slots)


class GuestClient:
    """Client of the engine process that ``tensorrt_llm`` has leased; gets events as that does."""

    def __init__(self, locate: Locate) -> None:
        self._client: EngineClient | None = None
        self._connector = GuestConnector(locate, TOKENS, self._open)

    @property
    def load(self) -> int | None:
        """Number of its requests; None while the engine is not there."""
        client = self._client
        return None if client is None or client.ended else client.stats().active

    def submit(self, handle: int, request: Any, emit: Callable[[Any], None]) -> None:
        """See `EngineClient.submit`; raises E2105 before the engine is loaded."""
        if self._client is None:
            raise loading()
        self._client.submit(handle, request, emit)

    def cancel(self, handle: int) -> None:
        """See `EngineClient.cancel`."""
        if self._client is not None:
            self._client.cancel(handle)

    def close(self) -> None:
        """Stop connecting, or close the connection."""
        self._connector.close()
        if self._client is not None:
            self._client.close()

    def _open(self, connection: Connection, slots: int) -> None:
        dead = self._client
        self._client = EngineClient(connection, slots, lambda: self._connector.lost())
        if dead is not None:
            dead.close()


class GuestClients:
    """Client of all engines that ``tensorrt_llm`` has leased, each request on one of them."""

    def __init__(self, locates: Sequence[Locate]) -> None:
        self._clients = [GuestClient(locate) for locate in locates]
        self._choice = ReplicaChoice()

    def submit(
        self, handle: int, request: Any, emit: Callable[[Any], None], prompt: Sequence[int]
    ) -> None:
        """Submit to the engine that is best for `prompt`; raises E2105 before one is loaded."""
        loads = {n: load for n, one in enumerate(self._clients) if (load := one.load) is not None}
        chosen = self._choice.choose(prompt, loads) if len(self._clients) > 1 and loads else 0
        self._clients[chosen].submit(handle, request, emit)

    def ask_all(
        self, handle: int, request: Any, answer: Callable[[Mapping[int, Any]], None]
    ) -> None:
        """Ask all engines that are there; `answer` gets the event that each answers with.

        Raises E2105 before one is loaded.
        """
        asked = [n for n, one in enumerate(self._clients) if one.load is not None]
        if not asked:
            raise loading()
        events: dict[int, Any] = {}
        lock = threading.Lock()

        def emit(number: int, event: Any) -> None:
            with lock:
                events[number] = event
                complete = len(events) == len(asked)
            if complete:
                answer(events)

        for number in asked:
            self._clients[number].submit(handle, request, partial(emit, number))

    def cancel(self, handle: int) -> None:
        """See `EngineClient.cancel`."""
        for client in self._clients:
            client.cancel(handle)

    def close(self) -> None:
        """See `GuestClient.close`."""
        for client in self._clients:
            client.close()


def loading() -> TritonUnavailable:
    """The error of requests that come before the engine is loaded."""
    return TritonUnavailable("the engine is still loading; try again later")
