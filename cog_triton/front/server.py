"""The server: one process with all public HTTP, the OpenAI API, metrics and predictions.

    python -m cog_triton.front.server --listen NAME=FD ... [--cog-only] [arguments of Cog]

Its parent has bound the sockets. It starts Cog and Triton on private ports. Where Cog is started
alone, Cog's worker runs ``cog-triton serve --behind-cog``, which has no PORT. The builder has
Cog only.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    TritonStartFailed,
    TritonUnavailable,
    Unauthorized,
)
from cog_triton.front.front import Front
from cog_triton.front.pass_through import cut_all
from cog_triton.front.upstream import PrivatePorts, Upstream
from cog_triton.processes.public_sockets import bound, received
from cog_triton.serving.cog_messages import ADDRESS_VARIABLE, LOG, CheckHealth, Predict, SetUp
from cog_triton.serving.cog_socket import Exchange, listen
from cog_triton.serving.coglet import cog_server
from cog_triton.serving.openai.error_responses import to_coded_error
from cog_triton.serving.openai.served_applications import (
    ReplaceableApp,
    ServedApplications,
    starting_app,
)
from cog_triton.serving.predictions import Predictions
from cog_triton.serving.runtime import Runtime
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.serving.tenants import Tenant
from cog_triton.settings import Settings, load_settings
from cog_triton.system import log_format, process_tuning
from cog_triton.system.log_format import DescriptorHandler
from cog_triton.system.tcp_sockets import listening_sockets

_TRITON = ("TRITON_HTTP_PORT", "TRITON_METRICS_PORT")
_SECRETS = (
    *("COG_TRITON_API_KEY", "OPENAI_API_KEY", "COG_TRITON_KEYS"),
    *("TLS_CERT_FILE", "TLS_KEY_FILE"),
)
_FLUSH_S = 2.0
_POLL_S = 0.2
_WEBHOOKS_S = 3.0
_LAST_EVENTS_S = 0.5
_COG_EXIT_S = 5.0
_FIRST = asyncio.FIRST_COMPLETED
_log = logging.getLogger("cog_triton.front.server")  # also as a program


class Server:
    """Listens from the first moment on; `run` serves until it is to stop.

    The first SIGTERM, SIGINT or POST /shutdown drains every API. Requests that arrive from then on
    get 503 (E2105), connections that ask for nothing are closed, and requests that run may end
    within DRAIN_TIMEOUT. A second signal ends the server at once. SIGUSR1 ends all requests with
    E2105, and then the server.
    """

    def __init__(
        self,
        settings: Settings,
        sockets: Mapping[str, socket.socket],
        for_cog: Sequence[str] | None,
        *,
        builds: bool,
    ) -> None:
        """`for_cog` are arguments of the Cog to start; None if Cog has started this server."""
        self._settings = settings
        self._for_cog = for_cog
        self._builds = builds
        self._address = os.environ.get(ADDRESS_VARIABLE) or f"cog-triton-{secrets.token_hex(16)}"
        private = PrivatePorts(("PORT",) if builds else ("PORT", *_TRITON))
        self._private = private
        check_id = None if builds or for_cog is None else self._address
        self._upstream = Upstream(private.numbers, check_id, settings.triton_start_timeout)
        self._apps = {name: ReplaceableApp(starting_app) for name in settings.http_ports}
        self._loop = asyncio.get_running_loop()
        self._setup_log = SetupLog()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._stop, self._hurry, self._failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._signalled = False
        self._deadline = 0.0
        self._runtime: Runtime | None = None
        self._predictions: Predictions | None = None
        self._upstream.ask_to_stop = self._stop.set
        if not builds:
            self._upstream.health = self._health
        descriptors = process_tuning.raise_open_files()
        self._front = Front(settings, descriptors, sockets, self._upstream, self._apps)

    async def run(self) -> int:
        """Serve until it is to stop; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        self._loop.add_signal_handler(signal.SIGUSR1, self._on_loss)
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(event.wait()) for event in (self._stop, self._failed)
        ]
        cog = None if self._for_cog is None else await self._start_cog(self._for_cog)
        if cog is not None:
            watching = asyncio.ensure_future(self._upstream.state.watch())
            waits.append(asyncio.ensure_future(cog.wait()))
        if not self._builds:
            await listen(self._address, self._obey)
            starting = self._loop.create_task(self._start())
            starting.add_done_callback(self._on_start)
        await asyncio.wait(waits, return_when=_FIRST)
        if not self._builds:
            starting.cancel()
        if self._stop.is_set():
            await self._drain()
        elif not self._failed.is_set():
            assert cog is not None
            _log.error("Cog has exited with code %d; the server stops", cog.returncode)
            self._end_requests(f"Cog has exited with code {cog.returncode}")
        if cog is not None:
            watching.cancel()
            await self._end_cog(cog)
        await self._front.flush(self._patience(_FLUSH_S))
        await self._front.deliver(self._patience(_WEBHOOKS_S if self._stop.is_set() else 0.0))
        await self._front.close()
        self._private.close()
        return 0 if self._stop.is_set() else 1

    def _on_signal(self) -> None:
        if self._signalled:
            self._hurry.set()
            self._end_requests("the server stops at once")
        self._signalled = True
        self._stop.set()

    def _on_loss(self) -> None:
        """Whoever started this gives it up."""
        self._end_requests("the server has lost a process that it needs")
        self._loop.call_later(_FLUSH_S / 2, self._failed.set)

    def _end_requests(self, reason: str) -> None:
        """End every request with E2105."""
        if self._runtime is not None:
            self._runtime.admission.close(TritonUnavailable(f"{reason}; try again"))
        cut_all()

    def _patience(self, least: float) -> Callable[[], bool]:
        """Whether to wait longer: the rest of DRAIN_TIMEOUT, or for `least` seconds from now.

        Not after a second signal.
        """
        end = max(self._deadline, time.monotonic() + least)
        return lambda: not self._hurry.is_set() and time.monotonic() < end

    async def _drain(self) -> None:
        seconds = self._settings.drain_timeout
        self._deadline = time.monotonic() + seconds
        _log.info("stopping: what runs may end within %g s (DRAIN_TIMEOUT)", seconds)
        await self._front.drain(self._patience(0.0))
        if self._runtime is not None:  # asynchronous predictions have no connection
            left = max(0.0, self._deadline - time.monotonic())
            drained = asyncio.ensure_future(asyncio.to_thread(self._runtime.drain, left))
            hurried = asyncio.ensure_future(self._hurry.wait())
            await asyncio.wait({drained, hurried}, return_when=_FIRST)

    async def _start(self) -> None:
        """Load the engine, then serve it."""
        settings = self._settings.behind_front(self._upstream.ports)
        with self._setup_log:
            telemetry = CompositeObserver(settings)
            applications = ServedApplications(settings, telemetry, self._apps)
            if settings.api_key or settings.has_tenants:
                telemetry.metrics.registry.register(self._front.refusals.counter)
            self._runtime = await Runtime.start(settings, self._give_up, telemetry)
            self._predictions = Predictions(
                self._runtime, telemetry, self._address, self._tenant_of
            )
            self._upstream.cancel = self._predictions.cancel
            applications.serve_runtime(self._runtime)
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

    def _tenant_of(self, prediction: str) -> Tenant | None:
        if not self._settings.has_tenants:
            return None
        running = self._upstream.predictions.get(prediction)
        if running is None or running.tenant is None:
            raise Unauthorized("the prediction has no tenant")
        return running.tenant

    async def _obey(self, order: Any, exchange: Exchange) -> None:
        if isinstance(order, SetUp):
            self._setup_log.follow(exchange)
            await asyncio.shield(self._started)
        elif self._runtime is None or self._predictions is None:
            raise TritonUnavailable("the server is starting; try again")
        elif isinstance(order, Predict):
            await self._predictions.run(order, exchange.prediction, exchange.send)
        elif isinstance(order, CheckHealth):
            self._runtime.require_ready()

    async def _start_cog(self, arguments: Sequence[str]) -> asyncio.subprocess.Process | None:
        """Start Cog; or have PORT answer 503 if another user has Cog's directory.

        The builder cannot do without: E2106.
        """
        try:
            cog_server.take_place()
        except TritonStartFailed as error:
            if self._builds:
                raise
            _log.warning("PORT answers 503: %s", error)
            self._setup_log.for_cog = False
            self._upstream.without_cog = error
            return None
        environment = {
            **os.environ,
            "COG_HOST": "127.0.0.1",
            "PORT": str(self._upstream.ports["PORT"]),
        }
        if not self._builds:
            environment[ADDRESS_VARIABLE] = self._address
        return await asyncio.create_subprocess_exec(
            *cog_server.command(arguments),
            env=cog_server.environment(_with_direct_loopback(environment)),
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

    async def _end_cog(self, cog: asyncio.subprocess.Process) -> None:
        """Stop Cog after the drain, once it has posted its last webhooks."""
        if cog.returncode is None:
            if not self._hurry.is_set():
                await asyncio.sleep(_LAST_EVENTS_S)
            cog.terminate()
        hurried = asyncio.ensure_future(self._hurry.wait())
        ended = asyncio.ensure_future(cog.wait())
        await asyncio.wait({ended, hurried}, timeout=_COG_EXIT_S, return_when=_FIRST)
        if not ended.done():
            cog.kill()
            await ended
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


def _with_direct_loopback(environment: dict[str, str]) -> dict[str, str]:
    """`environment` in which no proxy is asked for 127.0.0.1, where coglet posts webhooks."""
    direct = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if "*" not in direct.split(","):
        direct = f"{direct},127.0.0.1".lstrip(",")
    return {**environment, "no_proxy": direct, "NO_PROXY": direct}


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


async def _serve(
    settings: Settings,
    sockets: Mapping[str, socket.socket],
    for_cog: Sequence[str] | None,
    builds: bool,
) -> int:
    code = await Server(settings, sockets, for_cog, builds=builds).run()
    logging.shutdown()
    os._exit(code)  # threads that work for requests are not waited for; reapers end the engine


def main(arguments: Sequence[str]) -> int:
    """Run the server; see the module. The exit code, 1 with a coded line if it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m cog_triton.front.server", allow_abbrev=False)
    parser.add_argument("--listen", action="append", default=[], metavar="NAME=FD")
    parser.add_argument("--cog-only", action="store_true", help="as for builds: no Triton")
    options, for_cog = parser.parse_known_args(arguments)
    try:
        settings = _settings()
        return asyncio.run(_serve(settings, received(options.listen), for_cog, options.cog_only))
    except CogTritonError as error:
        _log.error("%s", error)
        return 1


def behind_cog() -> int:
    """Run the server of a Cog that was started alone, without PORT; Cog gets what it fails with."""
    try:
        settings = _settings()
        for name in ("cog_triton_keys", "tls_cert_file"):
            if (value := getattr(settings, name)) is not None:
                raise InvalidArgument(
                    f"{name.upper()}={value}: not for a Cog that was started alone, whose port has"
                    " neither; start the server by `cog-triton serve`"
                )
        ports = {name: at for name, at in settings.public_ports.items() if name != "PORT"}
        with bound(ports) as sockets:
            return asyncio.run(_serve(settings, sockets, None, builds=False))
    except CogTritonError as error:
        return asyncio.run(_refuse(error))


def _settings() -> Settings:
    """Settings of the environment, which processes that this one starts get without keys."""
    log_format.configure_from_environment("json")
    process_tuning.limit_arenas()
    settings = load_settings()
    log_format.configure(settings.log_format, settings.log_level)
    log_format.requests.disabled = not settings.log_requests
    # Whoever reads the log slowly delays no connection.
    log_format.lose_requests_rather_than_wait(*log_format.own())
    for name in _SECRETS:
        os.environ.pop(name, None)
    return settings


async def _refuse(error: CogTritonError) -> int:
    """Answer Cog's orders with the error, until Cog ends."""

    async def obey(order: Any, exchange: Exchange) -> None:
        raise error

    await listen(os.environ[ADDRESS_VARIABLE], obey)
    await asyncio.get_running_loop().create_future()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
