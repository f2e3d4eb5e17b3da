"""The server: one process with all public HTTP, the OpenAI API, metrics and predictions.

    python -m cog_triton.front.server --listen NAME=FD ... --private NAME=PORT ... --due FD
        [--cog-only | --triton-only [--model-repo DIR]] [--without-cog REASON]

Its parent has bound the sockets; `parent` is the one to that. Cog and Triton are on private ports.
If Cog is started by itself, Cog's worker runs ``cog-triton serve --behind-cog``, which has no PORT.
The builder has Cog only.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from cog_triton.errors import CogTritonError, TritonStartFailed, TritonUnavailable, Unauthorized
from cog_triton.front import triton_only_server
from cog_triton.front.access import Access, GuessLimit, Refusals, is_loopback
from cog_triton.front.cog_gate import CogGate
from cog_triton.front.cog_state import Upstream
from cog_triton.front.file_reader import keep_current
from cog_triton.front.gate import MetricsGate, OpenAIGate, PrivateGate
from cog_triton.front.http_protocol import Connections, PublicPort
from cog_triton.front.keyring import Keyring
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.listener import Certificate, Listener
from cog_triton.front.message import Limits
from cog_triton.front.pass_through import cut_all
from cog_triton.front.triton_gate import TritonGate
from cog_triton.front.webhook_relay import WebhookRelay, WebhookRules
from cog_triton.processes.orders import NotReady, Ready, RestartCog
from cog_triton.processes.parent_link import ParentLink
from cog_triton.serving.cog_messages import ADDRESS_VARIABLE, LOG, CheckHealth, Predict, SetUp
from cog_triton.serving.cog_socket import Exchange, listen
from cog_triton.serving.openai.error_responses import to_coded_error
from cog_triton.serving.openai.served_applications import (
    ReplaceableApp,
    ServedApplications,
    starting_app,
)
from cog_triton.serving.openai.stored_responses import RunningResponses
from cog_triton.serving.predictions import Predictions
from cog_triton.serving.runtime import Runtime
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.serving.tenants import Tenant
from cog_triton.settings import Settings, load_settings
from cog_triton.system import log_format, process_tuning
from cog_triton.system.log_format import DescriptorHandler
from cog_triton.system.ports import listening_sockets, received
from cog_triton.system.redaction import FRONT_VARIABLES
from cog_triton.system.shared_time import SharedTime

_FLUSH_S, _ANSWERS_S = 2.0, 1.0
_POLL_S, _LOOK_S = 0.2, 0.02
_WEBHOOKS_S = 3.0
_LAST_EVENTS_S = 0.5
_BEAT_S, _LATE_S = 1.0, 5.0
_RETURN_S = 10.0
_FIRST = asyncio.FIRST_COMPLETED
_log = logging.getLogger("cog_triton.front.server")  # also as a program
Patience = Callable[[], bool]
"""Whether to wait longer."""


class Front:
    """Serves on listening sockets, by the names of their settings, what an upstream answers."""

    def __init__(
        self,
        settings: Settings,
        descriptors: int,
        sockets: Mapping[str, socket.socket],
        upstream: Upstream,
        applications: Mapping[str, ASGIApp],
    ) -> None:
        """`applications` are those of this process, by the same names.

        `descriptors` is the limit of open files of this process. Raises E1005 for wrong keys.
        """
        self._settings = settings
        self._upstream = upstream
        self._limits = Limits.of(settings, descriptors)
        self._connections = Connections(self._limits.connections, self._limits.all_bodies_bytes)
        self._large_bodies = LargeBodies()
        self.webhooks = WebhookRelay(WebhookRules.of(settings))
        self._guesses = GuessLimit()
        self.refusals = Refusals()
        keys, chain = settings.cog_triton_keys, settings.tls_cert_file
        self._sockets, self._applications = sockets, applications
        self._keyring = None if keys is None else Keyring(keys, settings.api_key)
        key = settings.tls_key_file or chain
        self._certificate = Certificate(chain, key) if chain and key else None
        self._listeners: list[Listener] = []
        if "PORT" in sockets:
            self.webhooks.start()
        readers = [each for each in (self._keyring, self._certificate) if each is not None]
        self._watching = asyncio.ensure_future(keep_current(readers))

    def listen(self) -> None:
        """Begin to serve."""
        for name, listening in self._sockets.items():
            gate = self._gate(name, listening, self._applications.get(name))
            port = PublicPort(gate, self._limits, self._connections)
            self._listeners.append(Listener(listening, port.connection, self._certificate))

    async def drain(self, more: Patience) -> None:
        """Refuse what is new, and wait for what is answered, as long as `more` says so."""
        self._upstream.stopping = True
        self._connections.refuse_reuse()
        while (self._connections.answering or self._connections.may_ask) and more():
            await asyncio.sleep(_LOOK_S)

    async def flush(self, more: Patience) -> None:
        """Let clients have what was answered, and how the rest has ended."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _ANSWERS_S
        while (self._connections.answering and loop.time() < end) or (
            self._connections.has_unread and more()
        ):
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Close every connection, and give up webhooks, with a line in the log."""
        self._watching.cancel()
        await self.webhooks.close()
        for listener in self._listeners:
            listener.close()
        self._large_bodies.close()
        self._connections.abort_all()
        await asyncio.sleep(0)

    def _gate(self, name: str, listening: socket.socket, app: ASGIApp | None) -> PrivateGate:
        settings = self._settings
        loopback = is_loopback(listening.getsockname()[0])
        access = Access(settings.api_key, loopback, self._keyring, self._guesses, self.refusals)
        common = (self._upstream, name, access, self._limits, self._large_bodies)
        public = settings.metrics_public
        match name:
            case "PORT":
                page_port = settings.openai_port if settings.openai_page else None
                return CogGate(*common, self.webhooks, page_port, settings.scheme)
            case "TRITON_HTTP_PORT":
                return TritonGate(*common)
            case "OPENAI_PORT":
                page = settings.openai_page
                return OpenAIGate(*common, metrics_public=public, app=app, page=page)
            case _:
                return MetricsGate(*common, metrics_public=public, app=app)


class Server:
    """Listens from the first moment on, or in place of an earlier server once it can serve.

    `run` serves until it is to stop.

    The first SIGTERM, SIGINT or POST /shutdown drains every API. Requests that arrive from then on
    get 503 (E2105), connections that ask for nothing are closed, and requests that run may end
    within DRAIN_TIMEOUT. A second signal ends the server at once. SIGUSR1 ends all requests with
    E2105, and then the server.
    """

    def __init__(
        self,
        settings: Settings,
        sockets: Mapping[str, socket.socket],
        ports: Mapping[str, int],
        parent: ParentLink,
        options: argparse.Namespace,
    ) -> None:
        """`ports` are private ones, `options` those of `main`."""
        self._settings = settings
        self._parent = parent
        self._builds, self._triton_only = options.cog_only, options.triton_only
        self._model_repo = options.model_repo
        self._behind_cog = "PORT" not in ports and not self._triton_only
        self._has_cog = "PORT" in ports and options.without_cog is None
        self._address = os.environ.get(ADDRESS_VARIABLE, "")
        check_id = self._address if self._has_cog and not self._builds else None
        self._upstream = Upstream(ports, check_id, settings.triton_start_timeout)
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
        if options.without_cog is not None:
            self._upstream.without_cog = TritonStartFailed(options.without_cog)
            self._setup_log.for_cog = False
        self._upstream.state.on_loss = lambda why, late: parent.send(RestartCog(why, late))
        if not self._builds:
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
        if self._has_cog:
            watching = asyncio.ensure_future(self._upstream.state.watch())
        beginning = asyncio.ensure_future(self._begin())
        beginning.add_done_callback(self._on_begun)
        if self._parent.has_loaded:  # clients wait for an engine that is there
            waits.append(beginning)
            await asyncio.wait(waits, timeout=_RETURN_S, return_when=_FIRST)
            waits.remove(beginning)
        self._front.listen()
        await asyncio.wait(waits, return_when=_FIRST)
        beginning.cancel()
        if self._stop.is_set():
            await self._drain()
        ends: list[Coroutine[Any, Any, None]] = []
        if self._stop.is_set():  # Triton's gRPC clients come by us: they get its last seconds
            ends.append(self._parent.triton.stop())
        if self._has_cog:
            watching.cancel()
            if not self._hurry.is_set():
                await asyncio.sleep(_LAST_EVENTS_S)  # in which Cog posts its last webhooks
            ends.append(self._parent.stop_cog())
        await self._unless_hurried(*ends)
        await self._front.flush(self._patience(_FLUSH_S))
        least = _WEBHOOKS_S if self._stop.is_set() else 0.0
        await self._front.webhooks.drained(self._patience(least))
        await self._front.close()
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
        if self._runtime is not None:
            self._runtime.admission.close(TritonUnavailable(f"{reason}; try again"))
        cut_all()

    def _patience(self, least: float) -> Patience:
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
            await self._unless_hurried(self._runtime.drain(left))

    async def _unless_hurried(self, *work: Coroutine[Any, Any, None]) -> None:
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._hurry.wait()),
            asyncio.gather(*work),
        ]
        await asyncio.wait(waits, return_when=_FIRST)

    async def _begin(self) -> None:
        """Report to the parent that requests are served; see `_on_begun`."""
        if self._triton_only:
            server, message = await triton_only_server.start(
                self._settings, self._upstream.ports, self._parent, self._model_repo
            )
            self._parent.send(Ready(message))
            await triton_only_server.watch(self._settings, server)  # raises what fails
        if not self._builds:
            await listen(self._address, self._obey)
            await self._start()
        self._started.set_result(None)
        if self._has_cog:
            await self._upstream.state.started
        self._parent.send(Ready())

    def _on_begun(self, beginning: asyncio.Future[None]) -> None:
        """Report the error of the start, which /health-check shows, too."""
        if beginning.cancelled() or (error := beginning.exception()) is None:
            return
        coded = to_coded_error(error)
        if not (self._setup_log.for_cog or self._triton_only):
            _log.error("%s", coded)
        if not self._started.done():
            self._started.set_exception(coded)
        self._parent.send(NotReady(coded, ends=self._triton_only))
        if self._triton_only:
            self._failed.set()

    async def _start(self) -> None:
        settings = self._settings.behind_front(self._upstream.ports)
        with self._setup_log:
            telemetry = CompositeObserver(settings)
            # Before the engine loads, which would be in vain if the store's address is wrong.
            responses = await RunningResponses.of(settings) if settings.openai_port else None
            applications = ServedApplications(settings, telemetry, self._apps, responses)
            if settings.api_key or settings.has_tenants:
                telemetry.metrics.registry.register(self._front.refusals.counter)
            self._runtime = await Runtime.start(settings, self._parent, self._give_up, telemetry)
            self._predictions = Predictions(
                self._runtime, telemetry, self._address, self._tenant_of
            )
            self._upstream.cancel = self._predictions.cancel
            applications.serve_runtime(self._runtime)
        process_tuning.tune_for_serving()
        process_tuning.trim_periodically()
        if self._behind_cog:
            self._draining = asyncio.ensure_future(self._drain_with_cog(settings.port))

    def _give_up(self, error: CogTritonError) -> None:
        """Exit, once those requests have their answers that have just failed."""
        self._parent.send(NotReady(error, ends=True))
        self._loop.call_later(_FLUSH_S, self._failed.set)

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

    def _health(self) -> dict[str, Any]:
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

    async def _drain_with_cog(self, port: int) -> None:
        """Drain once a Cog that has started this server listens no more: it is to stop.

        Cog does not say so. It stops listening, and waits for its predictions without a limit.
        """
        assert self._runtime is not None
        listens = True
        while listens:
            await asyncio.sleep(_POLL_S)
            with suppress(OSError):  # no file descriptor is left to look with
                listens = any(found == port for found, _ in listening_sockets())
        await self._runtime.drain()


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


async def _serve(settings: Settings, options: argparse.Namespace) -> int:
    sockets = received(options.listen)
    due = SharedTime(options.due)
    parent = await ParentLink.of(sockets.pop("parent"))
    ports = {name: int(port) for name, _, port in (one.partition("=") for one in options.private)}
    beating = asyncio.ensure_future(_beat(due))
    code = await Server(settings, sockets, ports, parent, options).run()
    beating.cancel()
    logging.shutdown()
    os._exit(code)  # threads that work for requests are not waited for


async def _beat(due: SharedTime) -> None:
    """Report to the parent that the loop runs: one that is late, and sleeps, hangs."""
    while True:
        due.set(time.monotonic() + _LATE_S)
        await asyncio.sleep(_BEAT_S)


def main(arguments: Sequence[str]) -> int:
    """Run the server; see the module. The exit code, 1 with a coded line if it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m cog_triton.front.server", allow_abbrev=False)
    add = parser.add_argument
    add("--listen", action="append", default=[], metavar="NAME=FD")
    add("--private", action="append", default=[], metavar="NAME=PORT")
    add("--due", type=int, required=True, metavar="FD", help="shared time by which the loop is due")
    add("--cog-only", action="store_true", help="as for builds: no Triton")
    add("--triton-only", action="store_true", help="Triton's ports, without Cog")
    add("--model-repo", type=Path, help="with --triton-only: models to serve")
    add("--without-cog", metavar="REASON", help="why Cog was not started")
    options = parser.parse_args(arguments)
    try:
        return asyncio.run(_serve(_settings(), options))
    except CogTritonError as error:
        _log.error("%s", error)
        return 1


def _settings() -> Settings:
    """Settings of the environment, which processes that this one starts get without keys."""
    log_format.configure_from_environment("json")
    process_tuning.limit_arenas()
    settings = load_settings()
    log_format.configure(settings.log_format, settings.log_level)
    log_format.requests.disabled = not settings.log_requests
    # Whoever reads the log slowly delays no connection.
    log_format.lose_requests_rather_than_wait(*log_format.own())
    for name in FRONT_VARIABLES:
        os.environ.pop(name, None)
    return settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
