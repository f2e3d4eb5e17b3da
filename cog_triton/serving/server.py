"""The server: one process with the OpenAI API, metrics and predictions of one engine.

    python -m cog_triton.serving.server [arguments of cog.server.http]

The front door starts it, and it starts Cog on PORT. Where Cog is started alone, Cog's worker runs
``cog-triton serve --behind-cog``. It takes orders at COG_TRITON_SERVER_ADDRESS.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cog_triton import errors
from cog_triton.errors import CogTritonError, TritonStartFailed, TritonUnavailable
from cog_triton.serving.cog_messages import (
    ADDRESS_VARIABLE,
    LOG,
    Cancel,
    CheckHealth,
    Drain,
    Predict,
    SetUp,
)
from cog_triton.serving.cog_socket import Exchange, listen
from cog_triton.serving.coglet import cog_server
from cog_triton.serving.openai.error_responses import to_coded_error
from cog_triton.serving.openai.listeners import HTTPListeners, WithoutCog
from cog_triton.serving.predictions import Predictions
from cog_triton.serving.runtime import Runtime
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.settings import load_settings
from cog_triton.system import log_format, process_tuning
from cog_triton.system.log_format import DescriptorHandler
from cog_triton.system.tcp_sockets import listening_sockets

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_FLUSH_S = 2.0
_POLL_S = 0.2
_COG_EXIT_S = 5.0
_log = logging.getLogger("cog_triton.serving.server")  # also as a program


class Server:
    """Listens from the first moment on; `run` serves until it is to stop."""

    def __init__(self, address: str, for_cog: Sequence[str] | None) -> None:
        """`for_cog` are arguments of the Cog to start; None if Cog has started this server."""
        self._address = address
        self._for_cog = for_cog
        self._loop = asyncio.get_running_loop()
        self._setup_log = SetupLog()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._stop = asyncio.Event()
        self._failed = asyncio.Event()
        self._runtime: Runtime | None = None
        self._predictions: Predictions | None = None

    async def run(self) -> int:
        """Serve until SIGTERM, which drains if there is a Cog to stop; the exit code."""
        for number in _STOPPING:
            self._loop.add_signal_handler(number, self._stop.set)
        await listen(self._address, self._obey)
        cog = None if self._for_cog is None else await self._start_cog(self._for_cog)
        starting = self._loop.create_task(self._start())
        starting.add_done_callback(self._on_start)
        ends = [self._stop.wait(), self._failed.wait(), *([] if cog is None else [cog.wait()])]
        waits = [asyncio.ensure_future(end) for end in ends]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        if cog is not None:
            code = await self._end_cog(cog)
            if not (self._stop.is_set() or self._failed.is_set()):
                _log.error("Cog has exited with code %d; the server stops", code)
        return 0 if self._stop.is_set() else 1

    async def _start(self) -> None:
        """Load the engine, then serve it."""
        settings = load_settings()
        log_format.configure(settings.log_format, settings.log_level)
        with self._setup_log:
            telemetry = CompositeObserver(settings)
            listeners = HTTPListeners(settings, telemetry)
            self._runtime = await Runtime.start(settings, self._give_up, telemetry)
            self._predictions = Predictions(self._runtime, telemetry, self._address)
            listeners.serve_runtime(self._runtime)
        process_tuning.tune_for_serving()
        process_tuning.trim_periodically()
        if self._for_cog is None:
            self._draining = asyncio.ensure_future(self._drain_with_cog(settings.port))

    def _on_start(self, start: asyncio.Task[None]) -> None:
        """The engine is served, or Cog's set-up fails with the error."""
        if start.cancelled():
            return
        if (error := start.exception()) is None:
            self._started.set_result(None)
            return
        coded = to_coded_error(error)
        if not self._setup_log.for_cog:
            _log.error("%s", coded)
        self._started.set_exception(coded)

    def _give_up(self) -> None:
        """Exit, once those requests have their answers that have just failed; on any thread."""
        time.sleep(_FLUSH_S)
        self._loop.call_soon_threadsafe(self._failed.set)

    async def _obey(self, order: Any, exchange: Exchange) -> None:
        if isinstance(order, SetUp):
            self._setup_log.follow(exchange)
            await asyncio.shield(self._started)
        elif self._runtime is None or self._predictions is None:
            raise TritonUnavailable("the server is starting; try again")
        elif isinstance(order, Predict):
            await self._predictions.run(order, exchange.prediction, exchange.send)
        elif isinstance(order, Cancel):
            self._predictions.cancel(order.id)
        elif isinstance(order, CheckHealth):
            self._runtime.require_ready()
        elif isinstance(order, Drain):
            await asyncio.to_thread(self._runtime.drain, order.seconds)

    async def _start_cog(self, arguments: Sequence[str]) -> asyncio.subprocess.Process | None:
        """Start Cog on PORT; or have PORT answer 503 if another user has Cog's directory."""
        try:
            cog_server.take_place()
        except TritonStartFailed as error:
            _log.warning("PORT answers 503: %s", error)
            self._setup_log.for_cog = False
            WithoutCog(error, self._health).serve(int(os.environ.get("PORT", "5000")))
            return None
        return await asyncio.create_subprocess_exec(
            *cog_server.command(arguments), env=cog_server.environment(os.environ)
        )

    def _health(self) -> dict[str, Any]:
        """State of the server, as Cog's /health-check has it."""
        if not self._started.done():
            return {"status": "STARTING"}
        if (error := self._started.exception()) is not None:
            return {"status": "SETUP_FAILED", "setup": {"logs": str(error)}}
        try:
            assert self._runtime is not None
            self._runtime.require_ready()
        except CogTritonError as error:
            return {"status": "UNHEALTHY", "user_healthcheck_error": str(error)}
        return {"status": "READY"}

    async def _end_cog(self, cog: asyncio.subprocess.Process) -> int:
        """Stop Cog after the drain; its exit code."""
        if self._stop.is_set() and self._runtime is not None:
            await asyncio.to_thread(self._runtime.drain)
        if cog.returncode is None:
            cog.terminate()
        try:
            return await asyncio.wait_for(cog.wait(), _COG_EXIT_S)
        except TimeoutError:
            cog.kill()
            return await cog.wait()
        finally:
            cog_server.leave_place()

    async def _drain_with_cog(self, port: int) -> None:
        """Drain once a Cog that has started this server listens no more: it is to stop.

        Cog does not say so. It stops listening, and waits for its predictions without a limit.
        """
        assert self._runtime is not None
        listens = True
        while listens:
            await asyncio.sleep(_POLL_S)
            with suppress(OSError):  # no file descriptor is left to look with
                listens = any(listening_sockets(port))
        await asyncio.to_thread(self._runtime.drain)


class SetupLog(logging.Handler):
    """Log lines of the start, for Cog's `setup.logs`; a context.

    Cog logs them, too, so the process's own handler adds only warnings and errors meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.for_cog = True
        """Whether there is a Cog."""
        self._loop = asyncio.get_running_loop()
        self._lines: list[str] = []
        self._followers: list[Exchange] = []

    def follow(self, exchange: Exchange) -> None:
        """Send all lines, and those that come."""
        self._followers.append(exchange)
        for line in self._lines:
            exchange.send(LOG, line)

    def format(self, record: logging.LogRecord) -> str:
        """The message, with its level from warnings on."""
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.title()}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`; on any thread."""
        try:
            self._loop.call_soon_threadsafe(self._add, self.format(record))
        except Exception:  # noqa: BLE001 - as every handler of logging does
            self.handleError(record)

    def _add(self, line: str) -> None:
        self._lines.append(line)
        for exchange in self._followers:
            exchange.send(LOG, line)

    def __enter__(self) -> None:
        root = logging.getLogger()
        own = root.handlers if self.for_cog else ()
        self._own = [each for each in own if isinstance(each, DescriptorHandler)]
        root.addHandler(self)
        for handler in self._own:
            handler.setLevel(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        for handler in self._own:
            handler.setLevel(logging.NOTSET)
        logging.getLogger().removeHandler(self)


async def _run(for_cog: Sequence[str] | None) -> int:
    code = await Server(os.environ[ADDRESS_VARIABLE], for_cog).run()
    logging.shutdown()
    os._exit(code)  # threads that work for requests are not waited for; reapers end the engine


def main(for_cog: Sequence[str] | None = None) -> int:
    """Run the server; see the module."""
    log_format.configure_from_environment("json")
    if not os.environ.get(ADDRESS_VARIABLE):
        error = errors.InvalidArgument(f"{ADDRESS_VARIABLE} is not set: `cog-triton serve` sets it")
        _log.error("%s", error)
        return 1
    process_tuning.limit_arenas()
    return asyncio.run(_run(for_cog))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
