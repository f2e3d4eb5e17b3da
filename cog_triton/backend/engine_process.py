"""Runs a `StepEngine` in a process of its own, and serves it as a `TokenEngine`.

OpenVINO holds the GIL for a whole step. Within Triton's stub that would keep requests from
arriving and tokens from leaving; here both go on while the next step is computed. One
message crosses for each step, whatever the batch; steps that come while responses are still
being sent are joined.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cog_triton.engines.base import EngineStats, StepEngine
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.system import gc_tuning, isolated_python

Emit = Callable[[Any], None]
_CLOSE_TIMEOUT_S = 10
_AT_ONCE = 4096


def _joined(events: list[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Each request's output as one event: a response costs the same whatever it holds."""
    of_handle: dict[int, list[Any]] = {}
    for handle, event in events:
        of_handle.setdefault(handle, []).append(event)
    for handle, found in of_handle.items():
        for _, alike in groupby(found, _likeness):
            first, *others = alike
            yield handle, type(first).coalesce([first, *others]) if others else first


def _likeness(event: Any) -> tuple[type, bool]:
    """What events that can be joined have in common.

    A client gets what failed or cancelled its request in place of output, not beside it.
    """
    return type(event), event.error is not None or event.finish == "cancelled"


class EngineLink:
    """One connection to a served engine; see `cog_triton.engines.base.TokenEngine`.

    Requests and events are the engine's own, if only an event says by `finish` or `error` that
    it is its request's last, and its class has a `joined` as `TokenEvent` has, unless no request
    gets two. Whoever has got nothing yet goes before those who wait for more.
    """

    def __init__(
        self, connection: Connection, max_batch_size: int, on_death: Callable[[], None]
    ) -> None:
        """`on_death` is called once when the engine hangs up before it is asked to."""
        self._connection = connection
        self._poller = select.poll()  # Connection.poll makes a new one for each call
        self._poller.register(connection, select.POLLIN)
        self._max_batch_size = max_batch_size
        self._on_death = on_death
        self._closing = False
        self._emitters: dict[int, Emit] = {}
        self._begun: set[int] = set()  # handles that an event was emitted for
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._writer = threading.Thread(target=self._write, name="engine-requests", daemon=True)
        self._reader.start()
        self._writer.start()

    def submit(self, handle: int, request: Any, emit: Emit) -> None:
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
                arrived = self._receive()
            except (EOFError, OSError):  # an OSError when it died within a message
                self._fail_all()
                if not self._closing:
                    self._on_death()
                return
            for handle, event in sorted(_joined(arrived), key=lambda of: of[0] in self._begun):
                ended = event.finish is not None or event.error is not None
                (self._begun.discard if ended else self._begun.add)(handle)
                emit = (self._emitters.pop if ended else self._emitters.get)(handle, None)
                if emit is not None:
                    emit(event)

    def _receive(self) -> list[tuple[int, Any]]:
        """The next message, and those that have come besides while the last were emitted."""
        events: list[tuple[int, Any]] = self._connection.recv()
        while len(events) < _AT_ONCE and self._poller.poll(0):
            try:
                events += self._connection.recv()
            except (EOFError, OSError):
                break  # the next call meets it again
        return events

    def _fail_all(self) -> None:
        """The engine's process is gone: nothing that was submitted will ever end."""
        error = TritonUnavailable("the engine's process has ended; try again later")
        for handle in list(self._emitters):
            if (emit := self._emitters.pop(handle, None)) is not None:
                emit(TokenEvent([], [], error=error))


class EngineProcess(EngineLink):
    """The parent's side of an engine that runs in a child, and dies with us."""

    def __init__(
        self,
        engine: str,
        parameters: Mapping[str, str],
        owner: int | None = None,
    ) -> None:
        """`engine` is ``module:class``, opened by ``from_parameters(parameters)``.

        It is a `StepEngine`, or has a `serve` of its own; see `main`. `parameters` may name
        another Python for it, ``engine_python``, which then gets this package and nothing else
        of ours. `owner` is the process that serves the engine, and is stopped when the child
        dies here or when this process dies: whoever supervises the owner then knows. Raises the
        child's coded error when it cannot be opened, or RuntimeError when that has none; its
        traceback is on stderr.
        """
        self._stack = ExitStack()
        python, environment = parameters.get("engine_python"), None
        if python:
            links = self._stack.enter_context(TemporaryDirectory(prefix="cog-triton-"))
            environment = isolated_python.environment(Path(links))
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    python or sys.executable,
                    "-m",
                    __name__,
                    engine,
                    json.dumps(dict(parameters)),
                    str(theirs.fileno()),
                    str(owner or 0),
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        connection = Connection(ours.detach())
        try:
            opened = connection.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            self._stack.close()
            raise RuntimeError(
                f"the engine did not load: its process exited with {code}"
            ) from error
        if isinstance(opened, CogTritonError):
            self._process.wait()
            self._stack.close()
            raise opened
        super().__init__(connection, int(opened), partial(_signal, owner, signal.SIGTERM))

    @classmethod
    def opener(cls, engine: str) -> Callable[[Mapping[str, str]], EngineProcess]:
        """What `triton_model` calls with the model's parameters; Triton's server owns it."""
        return lambda parameters: cls(engine, parameters, owner=os.getppid())

    def close(self) -> None:
        """See `TokenEngine.close`; a child that does not end by itself is killed."""
        super().close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stack.close()


def _signal(owner: int | None, number: signal.Signals) -> None:
    if owner:
        with suppress(ProcessLookupError):  # it died first
            os.kill(owner, number)


def run_engine(engine: StepEngine, connection: Connection) -> None:
    """The child's loop: take messages, step, send what the step brought. Ends on EOF."""
    connection.send(engine.max_batch_size)
    poller = select.poll()
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
    """The child: open the engine and run it until the parent closes it or dies.

    An engine that is no `StepEngine` has ``serve(connection)``, which does what `run_engine` does.
    """
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
    gc_tuning.settle()
    try:
        if hasattr(opened, "serve"):
            opened.serve(connection)
        else:
            run_engine(opened, connection)
    except (EOFError, ConnectionError):
        # Nobody answers the owner's requests any more, and Triton does not tell.
        _signal(int(owner), signal.SIGKILL)


if __name__ == "__main__":
    main()
