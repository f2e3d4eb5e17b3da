"""A real HTTP server on 127.0.0.1 that speaks the step stream, as a test tells it to."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Self

from scripted_server import HANG, Part, Request, ScriptedServer, event, stream, wait_until, whole

from cog_triton.engines import step_items
from cog_triton.engines.step_items import StepItem

HEARTBEAT, RESENT = 1, 2


def step(number: int, *items: StepItem, flags: int = 0) -> bytes:
    """The response of a step."""
    encoded = step_items.encode(items)
    values: dict[str, Any] = {"step": [7, number, flags, len(items), *encoded.items]}
    if encoded.log_probs:
        floats = encoded.log_probs.tolist()
        values["log_probs"] = floats if len(floats) > 1 else floats[0]
    if encoded.errors:
        errors = encoded.errors
        values["step_errors"] = errors if len(errors) > 1 else errors[0]
    return event(**values)


def heartbeat(number: int = 0) -> bytes:
    """A heartbeat after step `number`."""
    return step(number, flags=HEARTBEAT)


class ScriptedSteps:
    """Triton's model ``engine_steps``: streams open with a heartbeat, commands are answered."""

    def __init__(self) -> None:
        self.server = ScriptedServer(self._answer)
        self.url = self.server.url
        self.instead: dict[str, list[Part]] = {}
        """What commands of this name get instead of their answer."""
        self.first_kept = 0
        """The first step that can be sent again."""
        self._over = False
        self._streams: list[SimpleQueue[bytes | None]] = []
        self._submits: defaultdict[int, SimpleQueue[bytes | None]] = defaultdict(SimpleQueue)

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self.server.__exit__(*error)

    @property
    def opened(self) -> int:
        """How many streams were opened."""
        return len(self._streams)

    def send(self, *events: bytes) -> None:
        """Send steps on the newest stream, in one read."""
        self._streams[-1].put(b"".join(events))

    def end_stream(self) -> None:
        """End the newest stream normally."""
        self._streams[-1].put(None)

    def answer(self, handle: int, status: str = "200 OK", **values: Any) -> None:
        """Answer a submitted request."""
        self._submits[handle].put(whole(json.dumps(values).encode(), status))

    def commands(self, name: str) -> list[dict[str, Any]]:
        """What came of a command so far."""
        found = [request.json for request in self.server.requests]
        return [values for values in found if values["step_command"] == name]

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait for `count` of a command."""
        wait_until(lambda: len(self.commands(name)) >= count)
        return self.commands(name)

    def _answer(self, request: Request) -> Iterable[Part]:
        values = request.json
        command = values["step_command"]
        assert request.path == f"/v2/models/engine_steps/generate{'_stream' * (command == 'open')}"
        if command in self.instead:
            return self.instead[command]
        if command == "open":
            self._streams.append(SimpleQueue())
            return self._steps(self._streams[-1])
        if command == "submit":
            return self._submitted(values["step_handle"])
        if command == "resend":
            first = max(values["step_number"], self.first_kept)
            return [whole(json.dumps({"step_number": first}).encode())]
        return [whole(b"{}")]

    def _steps(self, queue: SimpleQueue[bytes | None]) -> Iterator[Part]:
        yield from stream(heartbeat(), end=False)
        while (events := self._next(queue)) is not None:
            yield stream(events, end=False)[1]
        yield b"0\r\n\r\n"

    def _submitted(self, handle: int) -> Iterator[Part]:
        answer = self._next(self._submits[handle])
        yield HANG if answer is None else answer

    def _next(self, queue: SimpleQueue[bytes | None]) -> bytes | None:
        while not self._over:
            with suppress(Empty):
                return queue.get(timeout=0.05)
        return None
