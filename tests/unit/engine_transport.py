"""Token transport straight to an engine of this process: requests and steps as they travel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from cog_triton.engines import engine_messages
from cog_triton.engines.base import StepEngine
from cog_triton.engines.mock.mock_request import request_of
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import ERROR, StepBuffer, StepItem, decode
from cog_triton.errors import CogTritonError
from cog_triton.triton.infer_stream import Put


class EngineTransport:
    """Runs a step engine on a thread of its own; `requests` are those that it got."""

    last_token_at = 0.0

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._lock = threading.Condition()
        self._running: dict[int, tuple[Put, int, int]] = {}
        self._handles = 0
        self._closed = False
        self.requests: list[EngineRequest] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def open(self, generations: Mapping[int, int]) -> None: ...
    async def disconnect(self) -> None: ...

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join()

    def submit(self, request: EngineRequest, inputs: Mapping[str, Any], put: Put) -> _Submission:
        put = partial(asyncio.get_running_loop().call_soon_threadsafe, put)
        with self._lock:
            self._handles += 1
            handle = self._handles
            message = engine_messages.submit(handle, request_of(request, inputs))
            travelled = engine_messages.decode(message).request()
            self.requests.append(travelled)
            self._running[handle] = put, 0, travelled.log_prob_width
            try:
                self._engine.submit(handle, travelled)
            except CogTritonError as error:
                del self._running[handle]
                put(StepItem(handle, 0, 0, [], [], ERROR, str(error)))
            self._lock.notify()
        return _Submission(self, handle)

    def cancel(self, handle: int) -> None:
        with self._lock:
            if self._running.pop(handle, None):
                self._engine.cancel(handle)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                if self._engine.wait_s() is None:
                    self._lock.wait()
                    continue
                self._step()
                self._lock.wait(self._engine.wait_s())

    def _step(self) -> None:
        buffer = StepBuffer()
        for handle, event in self._engine.step():
            if handle in self._running:
                put, sent, width = self._running[handle]
                self._running[handle] = put, buffer.add(handle, sent, event, width), width
        step = buffer.encoded()
        for item in decode(step.items.tolist(), step.log_probs.tolist(), step.errors):
            put = self._running[item.handle][0]
            if item.end:
                del self._running[item.handle]
            put(item)


class _Submission:
    replica = 0

    def __init__(self, transport: EngineTransport, handle: int) -> None:
        self._transport = transport
        self._handle = handle

    def cancel(self) -> None:
        self._transport.cancel(self._handle)
