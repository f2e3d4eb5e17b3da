"""Triton model ``engine_steps``: pipes between our front end's gRPC stream and engines' sockets.

Private to our front end, which names a secret. Bytes pass as they are; see
`cog_triton.engines.step_pipe`.
"""

from __future__ import annotations

import hmac
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

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
_CHUNK = 1 << 18


class Pipe:
    """One front end's way to the engine at an address, on a thread of its own.

    A front end that is behind is waited for: the engine merges meanwhile what it cannot send.
    Triton (24.10) frees the responses of a request with the request: each call that says how much
    has arrived is a request, too, and takes the responses over.
    """

    def __init__(self, address: str, sender: Any) -> None:
        self._address = address
        self._senders = deque([sender])  # the last one sends, the others are to be ended
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._ending = False
        self._sizes: deque[int] = deque()  # of the responses that have not arrived
        self._size = self._arrived = self._sent = 0
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="engine-pipe", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it is of no use any more."""
        return not self._thread.is_alive()

    def send(self, content: bytes) -> None:
        """Send bytes to the engine, if it is there; what it does not take yet follows."""
        with self._lock:
            self._unsent += content
            self._write()
            left = bool(self._unsent)
        if left:
            self._wake_up()

    def arrived(self, responses: int, sender: Any) -> bool:
        """The front end has so many responses; whether `sender` sends those that follow."""
        with self._lock:
            while self._sizes and self._arrived < responses:
                self._arrived += 1
                self._size -= self._sizes.popleft()
            if taken := bool(self._senders):
                self._senders.append(sender)
        self._wake_up()
        return taken

    def close(self) -> None:
        """Hang up on the engine, which cancels what runs; the request ends."""
        self._ending = True
        self._wake_up()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def _wake_up(self) -> None:
        with suppress(OSError):  # it has ended, or is to wake up already
            self._waker.send(b"w")

    def _run(self) -> None:
        answer: Any = None
        try:
            if self._connect() and self._carry():
                answer = python_backend.error_response(engine_gone())
        except CogTritonError as error:
            answer = python_backend.error_response(error)
        except Exception:  # noqa: BLE001 - the front end has to hear of it
            _log.exception("the pipe to the engine ends")
            answer = python_backend.error_response(engine_gone())
        finally:
            with self._lock:
                for own in (self._socket, self._waker, self._woken):
                    if own is not None:
                        own.close()
                *older, last = self._senders
                self._senders.clear()
        with suppress(Exception):  # the front end is gone
            for sender in older:
                sender.send(flags=_FINAL)
            if answer is None or last.is_cancelled():
                last.send(flags=_FINAL)
            else:
                last.send(answer, flags=_FINAL)

    def _connect(self) -> bool:
        """Connect as soon as the engine is there; False if the front end is gone before."""
        while not self._ending and not self._senders[-1].is_cancelled():
            try:
                own = local_socket.connect(self._address)
            except OSError:
                time.sleep(_RETRY_S)
                continue
            own.setblocking(False)
            with self._lock:
                self._socket = own
                self._unsent[:0] = frame(engine_messages.encode(Hello("steps")))
                self._write()
            return True
        return False

    def _carry(self) -> bool:
        """Pass on the engine's bytes; True if the engine ends it, False if the front end does."""
        assert self._socket is not None
        poller, look_at = select.poll(), 0.0
        poller.register(self._woken, select.POLLIN)
        while not self._ending:
            while len(self._senders) > 1:
                self._senders.popleft().send(flags=_FINAL)
            behind = (
                len(self._sizes) >= step_pipe.MOST_RESPONSES or self._size >= step_pipe.MOST_BYTES
            )
            events = 0 if behind else select.POLLIN
            poller.register(self._socket, events | (select.POLLOUT if self._unsent else 0))
            ready = dict(poller.poll(1000 * _LOOK_S))
            if self._woken.fileno() in ready:
                self._woken.recv(_CHUNK)
            found = ready.get(self._socket.fileno(), 0)
            if found & select.POLLOUT:
                with self._lock:
                    self._write()
            if found & ~select.POLLOUT and not self._pass_on():
                return True
            if (now := time.monotonic()) >= look_at:  # it costs a round trip to Triton
                look_at = now + _LOOK_S
                if self._senders[-1].is_cancelled():
                    return False
        return False

    def _pass_on(self) -> bool:
        """Pass on what has arrived; False after the end."""
        assert self._socket is not None
        try:
            content = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not content:
            return False
        with self._lock:
            self._sizes.append(len(content))
            self._size += len(content)
        content, self._sent = step_pipe.numbered(self._sent, content), self._sent + 1
        tensor = pb_utils.Tensor(step_pipe.BYTES, np.frombuffer(content, np.uint8))
        python_backend.send(self._senders[-1], pb_utils.InferenceResponse([tensor]))
        return True

    def _write(self) -> None:
        """Send what the engine takes; under the lock."""
        if self._socket is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # reading notices it, too
            self._unsent.clear()


class TritonPythonModel:
    """See the module; requests of one instance are carried out in the order of the stream."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Connects to no engine before a front end asks for it."""
        triton_log.install()
        self._pipes: dict[str, Pipe] = {}
        self._key = os.environ.get(step_pipe.KEY_VARIABLE, "")
        process_tuning.tune_for_serving()

    def execute(self, requests: list[Any]) -> None:
        """Carry out calls."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensor = pb_utils.get_input_tensor_by_name(request, step_pipe.CALL)
                ends = self._execute(request.request_id(), tensor.as_numpy().tobytes(), sender)
            except (CogTritonError, ValueError) as error:
                known = error if isinstance(error, CogTritonError) else InvalidArgument(str(error))
                sender.send(python_backend.error_response(known), flags=_FINAL)
            else:
                if ends:
                    sender.send(flags=_FINAL)

    def finalize(self) -> None:
        """End all pipes."""
        for pipe in self._pipes.values():
            pipe.close()
        for pipe in self._pipes.values():
            pipe.join()

    def _execute(self, name: str, call: bytes, sender: Any) -> bool:
        """Carry out a call; whether that is all."""
        kind, pipe = call[:1], self._pipes.get(name)
        if kind == step_pipe.OPEN:
            self._open(name, call, sender)
            return False
        if pipe is not None and kind == step_pipe.SEND:
            pipe.send(call[1:])
        elif pipe is not None and kind == step_pipe.ARRIVED:
            return not pipe.arrived(int(call[1:]), sender)
        elif pipe is not None and kind == step_pipe.CLOSE:
            self._pipes.pop(name).close()
        return True

    def _open(self, name: str, call: bytes, sender: Any) -> None:
        replica, key = step_pipe.read_open(call)
        if not self._key or not hmac.compare_digest(key.encode(), self._key.encode()):
            raise InvalidArgument("engine_steps: this model is for the server's own front end")
        addresses = own_addresses()
        if not (0 <= replica < len(addresses) and name):
            raise InvalidArgument(f"engine_steps: there is no engine {replica}, or no id")
        for other in [other for other, pipe in self._pipes.items() if pipe.ended]:
            del self._pipes[other]
        if name in self._pipes:
            raise InvalidArgument(f"engine_steps: {name!r:.40} is open")
        self._pipes[name] = Pipe(addresses[replica], sender)
