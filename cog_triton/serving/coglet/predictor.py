"""Cog's predictor: forwards each prediction to the server, and what that answers to Cog.

The server starts Cog. Alone (`python -m cog.server.http`), `setup`
starts the server.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from cog import BaseRunner, CancelationException, ConcatenateIterator, Input

from cog_triton import errors
from cog_triton.ipc.framing import FrameDecoder, frame
from cog_triton.ipc.messages import encode
from cog_triton.serving.cog_messages import (
    ADDRESS_VARIABLE,
    CANCELLED,
    END,
    ERROR,
    METRICS,
    OUTPUT,
    CheckHealth,
    Order,
    Predict,
    SetUp,
)
from cog_triton.serving.coglet import streaming
from cog_triton.serving.mock_inputs import MockInputs
from cog_triton.serving.prediction_inputs import PredictionInputs
from cog_triton.system import local_socket, process_tuning, reaper
from cog_triton.system.log_format import STDERR
from cog_triton.system.process_state import exit_with_parent, stop_parent
from cog_triton.text.sampling import SAMPLING

_GRACE_S = 30.0
_CONNECT_S = 0.02
_CHUNK = 1 << 14
Method = TypeVar("Method", bound=Callable[..., Any])


def takes(kind: type[PredictionInputs]) -> Callable[[Method], Method]:
    """Decorator: a predictor's method has the fields of `kind` as inputs, for its ``**inputs``."""
    bounds = {item.name: item.inputs or {} for item in SAMPLING}
    hints = get_type_hints(kind)
    parameters = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=Input(default=item.default, **bounds.get(item.name, {}), **item.metadata),
            annotation=hints[item.name],
        )
        for item in fields(kind)
    ]

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method, eval_str=True)
        own, _ = signature.parameters.values()
        method.__annotations__ = {
            **{item.name: hints[item.name] for item in fields(kind)},
            "return": signature.return_annotation,
        }
        method.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[own, *parameters]
        )
        return method

    return decorate


class Predictor(BaseRunner):  # type: ignore[misc]
    """Streams what the server answers; coglet iterates each stream on the slot's own thread."""

    mock: ClassVar[bool] = False

    async def setup(self, weights: str | None = None) -> None:
        """Wait until the server is ready; its error is that of /health-check's SETUP_FAILED."""
        exit_with_parent()
        process_tuning.limit_arenas()
        streaming.install(type(self).run)
        self._address = os.environ.get(ADDRESS_VARIABLE) or ""
        await asyncio.to_thread(self._set_up, weights)
        process_tuning.tune_for_serving()

    def _set_up(self, weights: str | None) -> None:
        server = None if self._address else self._start_server(weights)
        while True:
            try:
                own = local_socket.connect(self._address)
                break
            except OSError:
                if server is not None and server.poll() is not None:
                    raise errors.TritonStartFailed("the server has ended") from None
                time.sleep(_CONNECT_S)
        for _, line in _frames(own, SetUp()):
            print(line)
        if server is not None:
            threading.Thread(target=_follow, args=(server,), daemon=True).start()

    def _start_server(self, weights: str | None) -> reaper.Reaped:
        self._address = f"cog-triton-{secrets.token_hex(16)}"
        environment = {**os.environ, ADDRESS_VARIABLE: self._address}
        environment |= {"COG_TRITON_ENGINE": "mock"} if self.mock else {}
        environment |= {"COG_WEIGHTS": weights} if weights else {}
        command = [sys.executable, "-m", "cog_triton", "serve", "--behind-cog"]
        log = inherited_stderr()
        return reaper.spawn(command, grace=_GRACE_S, env=environment, stdout=log, stderr=log)

    async def healthcheck(self) -> bool:
        """Whether predictions are served; else raises the error that /health-check shows."""

        def ask() -> None:
            for _ in _frames(local_socket.connect(self._address), CheckHealth()):
                pass

        await asyncio.to_thread(ask)
        return True

    @takes(PredictionInputs)
    async def run(self, **inputs: Any) -> ConcatenateIterator[str]:
        """The stream of a prediction; awaits nothing."""
        return self.stream(inputs)

    def stream(self, inputs: dict[str, Any]) -> ConcatenateIterator[str]:
        """A generator of text; it is not begun before coglet's thread does so."""
        name = streaming.prediction_id()
        return streaming.cancellable(self._forward, Predict(name, inputs, self.mock))

    def _forward(self, order: Predict, connection: streaming.Hangup) -> Generator[str, None, None]:
        try:
            own = local_socket.connect(self._address)
        except OSError as error:
            raise errors.TritonUnavailable(f"the server: {error.strerror}; try again") from None
        connection.set(own)
        for kind, text in _frames(own, order):
            if kind == OUTPUT:
                yield text
            elif kind == METRICS:
                for metric, value in json.loads(text).items():
                    self.scope.record_metric(metric, value)
            else:
                print(text)


class MockPredictor(Predictor):
    """Predictor with the inputs of the original's mock server besides its own."""

    mock = True

    @takes(MockInputs)
    async def run(self, **inputs: Any) -> ConcatenateIterator[str]:
        return self.stream(inputs)


def _frames(own: socket.socket, order: Order) -> Iterator[tuple[bytes, str]]:
    """Frames that answer an order, up to its end; text that has come together is joined.

    Raises the coded error that ends it, and CancelationException.
    """
    decoder = FrameDecoder()
    with own:
        try:
            own.sendall(frame(encode(order)))
            while data := own.recv(_CHUNK):
                output = ""
                for payload in decoder.feed(data):
                    kind, text = payload[:1], payload[1:].decode("utf-8", "surrogatepass")
                    if kind == OUTPUT:
                        output += text
                        continue
                    if output:
                        yield OUTPUT, output
                        output = ""
                    if kind == END:
                        return
                    if kind == CANCELLED:
                        raise CancelationException
                    if kind == ERROR:
                        raise errors.from_text(text) or RuntimeError(text)
                    yield kind, text
                if output:
                    yield OUTPUT, output
        except OSError:
            pass
    raise errors.TritonUnavailable("the server has ended; try again")


def _follow(server: reaper.Reaped) -> None:
    """End Cog with its server: a platform starts both again."""
    server.wait()
    stop_parent()


def inherited_stderr() -> int:
    """File descriptor of the stderr that Cog's server was started with.

    coglet 0.23.1 replaces the worker's stderr by a pipe, and wraps every line that it reads there;
    but it leaves the inherited one open under another number, which is recognized by being the
    same file as our parent's stderr.
    """
    with suppress(OSError):
        wanted = Path(f"/proc/{os.getppid()}/fd/{STDERR}").stat()
        for name in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
            descriptor = int(name.name)
            with suppress(OSError):
                if descriptor > STDERR and os.path.samestat(os.fstat(descriptor), wanted):
                    return descriptor
    return STDERR
