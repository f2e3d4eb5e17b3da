"""Runs a `StepEngine` in a process of its own, and serves it as a `TokenEngine`.

OpenVINO holds the GIL for a whole step. Within Triton's stub that would keep requests from
arriving and tokens from leaving; here both go on while the next step is computed. One
message crosses for each step, whatever the batch.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from cog_triton.engines.base import EngineRequest, EngineStats, StepEngine, TokenEvent
from cog_triton.errors import CogTritonError, TritonUnavailable

Emit = Callable[[TokenEvent], None]


class EngineProcess:
    """The parent's side; see `cog_triton.engines.base.TokenEngine`."""

    def __init__(
        self,
        engine: str,
        parameters: Mapping[str, str],
        owner: int | None = None,
    ) -> None:
        """`engine` is ``module:class``, opened by ``from_parameters(parameters)``.

        `owner` is the process that serves the engine, and is stopped when the child dies here
        or when this process dies: whoever supervises the owner then knows. Raises the child's
        coded error when it cannot be opened, or RuntimeError when that has none; its traceback
        is on stderr.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __name__,
                    engine,
                    json.dumps(dict(parameters)),
                    str(theirs.fileno()),
                    str(owner or 0),
                ],
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        try:
            opened = self._connection.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            raise RuntimeError(
                f"the engine did not load: its process exited with {code}"
            ) from error
        if isinstance(opened, CogTritonError):
            self._process.wait()
            raise opened
        self._max_batch_size = int(opened)
        self._owner = owner
        self._closing = False
        self._emitters: dict[int, Emit] = {}
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._writer = threading.Thread(target=self._write, name="engine-requests", daemon=True)
        self._reader.start()
        self._writer.start()

    @classmethod
    def opener(cls, engine: str) -> Callable[[Mapping[str, str]], EngineProcess]:
        """What `triton_model` calls with the model's parameters; Triton's server owns it."""
        return lambda parameters: cls(engine, parameters, owner=os.getppid())

    def submit(self, handle: int, request: EngineRequest, emit: Emit) -> None:
        """See `TokenEngine.submit`."""
        self._emitters[handle] = emit
        self._outbox.put(("submit", handle, request))

    def cancel(self, handle: int) -> None:
        """See `TokenEngine.cancel`."""
        self._outbox.put(("cancel", handle, None))

    def stats(self) -> EngineStats:
        """See `TokenEngine.stats`."""
        active = len(self._emitters)
        return EngineStats(active, max(0, active - self._max_batch_size), self._max_batch_size)

    def close(self) -> None:
        """See `TokenEngine.close`."""
        self._closing = True
        self._outbox.put(None)
        self._writer.join()
        self._reader.join()
        self._process.wait()

    def _write(self) -> None:
        message = ...
        while message is not None:
            message = self._outbox.get()
            try:
                self._connection.send(message)
            except OSError:
                self._reader.join()  # two threads must not emit for one request
                self._fail_all()

    def _read(self) -> None:
        while True:
            try:
                events: list[tuple[int, TokenEvent]] = self._connection.recv()
            except (EOFError, OSError):  # an OSError when it died within a message
                self._fail_all()
                if self._owner and not self._closing:
                    os.kill(self._owner, signal.SIGTERM)
                return
            for handle, event in events:
                ended = event.finish is not None or event.error is not None
                emit = (self._emitters.pop if ended else self._emitters.get)(handle, None)
                if emit is not None:
                    emit(event)

    def _fail_all(self) -> None:
        """The engine's process is gone: nothing that was submitted will ever end."""
        error = TritonUnavailable("the engine's process has ended; try again later")
        for handle in list(self._emitters):
            if (emit := self._emitters.pop(handle, None)) is not None:
                emit(TokenEvent([], [], error=error))


def run_engine(engine: StepEngine, connection: Connection) -> None:
    """The child's loop: take messages, step, send what the step brought. Ends on EOF."""
    connection.send(engine.max_batch_size)
    poller = select.poll()  # Connection.poll makes a new one for each call
    poller.register(connection, select.POLLIN)
    while True:
        events: list[tuple[int, TokenEvent]] = []
        busy = engine.live > 0
        while poller.poll(0 if busy else None):
            busy = True
            message = connection.recv()
            if message is None:
                return
            kind, handle, request = message
            if kind == "cancel":
                engine.cancel(handle)
                continue
            try:
                engine.submit(handle, request)
            except CogTritonError as error:
                events.append((handle, TokenEvent([], [], error=error)))
        if events := events + engine.step():
            connection.send(events)


def main() -> None:
    """The child: open the engine and run it until the parent closes it or dies."""
    name, parameters, descriptor, owner = sys.argv[1:]
    connection = Connection(int(descriptor))
    os.set_inheritable(int(descriptor), False)
    module, _, attribute = name.partition(":")
    engine = getattr(importlib.import_module(module), attribute)
    try:
        opened = engine.from_parameters(json.loads(parameters))
    except CogTritonError as error:
        connection.send(error)
        raise
    try:
        run_engine(opened, connection)
    except (EOFError, ConnectionError):
        if owner != "0":  # nobody answers its requests any more, and Triton does not tell
            with suppress(ProcessLookupError):
                os.kill(int(owner), signal.SIGKILL)


if __name__ == "__main__":
    main()
