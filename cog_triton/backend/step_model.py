"""Triton model ``engine_steps``: pipes between our front end's gRPC stream and engines' sockets.

Private to our front end, which names a secret. Bytes pass as they are; see
`cog_triton.engines.step_pipe`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend, triton_log
from cog_triton.engines import engine_messages, step_pipe
from cog_triton.engines.engine_messages import Hello, engine_gone
from cog_triton.engines.engine_spec import own_addresses
from cog_triton.errors import CogTritonError, InvalidArgument
from cog_triton.ipc.framing import frame
from cog_triton.system import local_socket, process_tuning

_log = logging.getLogger(__name__)
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_LOOK_S = 0.25
_RETRY_S = 0.02


class Pipe(asyncio.Protocol):
    """One front end's way to the engine at an address.

    A front end that is behind is waited for: the engine merges meanwhile what it cannot send.
    Triton (24.10) frees the responses of a request with the request: each call that says how much
    has arrived is a request, too, and takes the responses over.
    """

    def __init__(self, address: str, sender: Any) -> None:
        self._address = address
        self._sender = sender
        self._transport: asyncio.Transport | None = None
        self._unsent = [frame(engine_messages.encode(Hello("steps")))]
        self._sizes: deque[int] = deque()  # of the responses that have not arrived
        self._size = self._arrived = self._sent = 0
        self._ended = asyncio.Event()
        self._is_lost = False

    async def run(self) -> None:
        """Carry bytes until the engine or the front end ends it; then the request ends."""
        answer: Any = None
        try:
            await self._carry()
            if self._is_lost:
                answer = python_backend.error_response(engine_gone())
        except Exception:  # noqa: BLE001 - the front end has to hear of it
            _log.exception("the pipe to the engine ends")
            answer = python_backend.error_response(engine_gone())
        self._ended.set()
        if self._transport is not None:
            self._transport.abort()
        with suppress(Exception):  # the front end is gone
            if answer is None or self._sender.is_cancelled():
                self._sender.send(flags=_FINAL)
            else:
                self._sender.send(answer, flags=_FINAL)

    async def _carry(self) -> None:
        loop = asyncio.get_running_loop()
        while self._transport is None and not self._ended.is_set():
            if self._sender.is_cancelled():
                return
            try:
                own = local_socket.connect(self._address)
                await loop.create_unix_connection(lambda: self, sock=own)
            except OSError:
                await asyncio.sleep(_RETRY_S)
        while not self._ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _LOOK_S)
                return
            if self._sender.is_cancelled():  # it costs a round trip to Triton
                return

    def send(self, content: bytes) -> None:
        """Send bytes to the engine, once it is there."""
        if self._transport is None:
            self._unsent.append(content)
        else:
            self._transport.write(content)

    def arrived(self, responses: int, sender: Any) -> None:
        """The front end has so many responses; `sender` sends those that follow."""
        while self._sizes and self._arrived < responses:
            self._arrived += 1
            self._size -= self._sizes.popleft()
        older, self._sender = self._sender, sender
        older.send(flags=_FINAL)
        self._wait_for_reader()

    def close(self) -> None:
        """Hang up on the engine, which cancels what runs; the request ends."""
        self._ended.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what has waited."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(b"".join(self._unsent))

    def data_received(self, data: bytes) -> None:
        """Pass on what has arrived."""
        self._sizes.append(len(data))
        self._size += len(data)
        content, self._sent = step_pipe.numbered(self._sent, data), self._sent + 1
        tensor = pb_utils.Tensor(step_pipe.BYTES, np.frombuffer(content, np.uint8))
        python_backend.send(self._sender, pb_utils.InferenceResponse([tensor]))
        self._wait_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine's process is gone, unless this end has hung up."""
        self._is_lost = not self._ended.is_set()
        self._ended.set()

    def _wait_for_reader(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if len(self._sizes) >= step_pipe.MOST_RESPONSES or self._size >= step_pipe.MOST_BYTES:
            transport.pause_reading()
        else:
            transport.resume_reading()


class TritonPythonModel:
    """See the module; requests of one instance are carried out in the order of the stream."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Connects to no engine before a front end asks for it."""
        triton_log.install()
        self._pipes: dict[str, Pipe] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._key = os.environ.get(step_pipe.KEY_VARIABLE, "")
        process_tuning.tune_for_serving()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pipes", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Have the loop carry out calls."""
        for request in requests:
            call = pb_utils.get_input_tensor_by_name(request, step_pipe.CALL).as_numpy().tobytes()
            sender, name = request.get_response_sender(), request.request_id()
            self._loop.call_soon_threadsafe(self._answer, name, call, sender)

    def finalize(self) -> None:
        """End all pipes."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        await asyncio.gather(*self._tasks)

    def _answer(self, name: str, call: bytes, sender: Any) -> None:
        try:
            ends = self._carry_out(name, call, sender)
        except (CogTritonError, ValueError) as error:
            known = error if isinstance(error, CogTritonError) else InvalidArgument(str(error))
            sender.send(python_backend.error_response(known), flags=_FINAL)
        else:
            if ends:
                sender.send(flags=_FINAL)

    def _carry_out(self, name: str, call: bytes, sender: Any) -> bool:
        """Carry out a call; whether that is all."""
        kind, pipe = call[:1], self._pipes.get(name)
        if kind == step_pipe.OPEN:
            self._open(name, call, sender)
            return False
        if pipe is not None and kind == step_pipe.SEND:
            pipe.send(call[1:])
        elif pipe is not None and kind == step_pipe.ARRIVED:
            pipe.arrived(int(call[1:]), sender)
            return False
        elif pipe is not None and kind == step_pipe.CLOSE:
            pipe.close()
        return True

    def _open(self, name: str, call: bytes, sender: Any) -> None:
        replica, key = step_pipe.read_open(call)
        if not self._key or not hmac.compare_digest(key.encode(), self._key.encode()):
            raise InvalidArgument("engine_steps: this model is for the server's own front end")
        addresses = own_addresses()
        if not (0 <= replica < len(addresses) and name):
            raise InvalidArgument(f"engine_steps: there is no engine {replica}, or no id")
        if name in self._pipes:
            raise InvalidArgument(f"engine_steps: {name!r:.40} is open")
        pipe = self._pipes[name] = Pipe(addresses[replica], sender)
        task = self._loop.create_task(self._run(name, pipe))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, name: str, pipe: Pipe) -> None:
        await pipe.run()
        del self._pipes[name]  # in the same turn of the loop: no call finds a pipe that has ended
