"""The server as a child process (``cog-triton serve``): its ports, its start, its watch."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from cog_triton import __version__, errors
from cog_triton.artifact.compatibility import require_image
from cog_triton.processes.public_sockets import as_arguments
from cog_triton.serving.cog_health import (
    NO_ANSWER,
    CogProcesses,
    CogWatch,
    HealthClient,
    still_starting,
)
from cog_triton.settings import Settings, url_host
from cog_triton.system import process_tuning, reaper
from cog_triton.system.host_memory import OomKills
from cog_triton.system.paths import cog_project
from cog_triton.system.terminal_progress import ProgressLine
from cog_triton.system.work_dir import require_usable

_POLL_S = 0.05
_STOPPED_S = 0.5
_HEARTBEAT_S = 30
_EXIT_S = 15


def ready_message(settings: Settings, seconds: float) -> str:
    """What is printed when Cog is ready after `seconds`: ports, and a request to try."""
    name = url_host(settings.cog_host)
    base = f"{settings.scheme}://{'localhost' if name == '127.0.0.1' else name}"
    openai = f"OpenAI API on {settings.openai_port}, " if settings.openai_port else ""
    page = ""
    if settings.openai_port and settings.openai_page:
        page = f" {base}:{settings.openai_port}/ in a browser, or"
    grpc = "" if settings.has_tenants else f" {settings.triton_grpc_port},"
    return (
        f"Ready in {seconds:.1f} s ({openai}Triton on {settings.triton_http_port},"
        f"{grpc} {settings.triton_metrics_port}). Try{page}:\n"
        f"curl -sN -XPOST {base}:{settings.port}/predictions"
        " -H 'Content-Type: application/json' -H 'Accept: text/event-stream'"
        """ -d '{"input":{"prompt":"What is the capital of France?"}}'"""
    )


def cog_environment(settings: Settings, max_concurrency: int, *, verbose: bool) -> dict[str, str]:
    """The complete environment of the server.

    Paths are absolute, since it runs in the directory of Cog's project. `verbose` leaves Cog's own
    log on.
    """
    weights = settings.cog_weights or ""
    environment = {
        **os.environ,
        # coglet starts its worker as `python` of PATH, not as this interpreter.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "COG_HOST": settings.cog_host,
        "PORT": str(settings.port),
        "OPENAI_PORT": str(settings.openai_port or ""),
        "METRICS_PORT": str(settings.metrics_port or ""),
        "COG_PREDICT_TYPE_STUB": "predict.py:Predictor",
        "COG_MAX_CONCURRENCY": str(max_concurrency),
        "TRITON_HOST": settings.triton_host,
        "TRITON_HTTP_PORT": str(settings.triton_http_port),
        "TRITON_GRPC_PORT": str(settings.triton_grpc_port),
        "TRITON_METRICS_PORT": str(settings.triton_metrics_port),
        **_paths(settings),
        "COG_TRITON_WORK_DIR": str(settings.work_dir.resolve()),
        "ENGINE_DIR": str(settings.engine_dir.resolve()),
        "COG_WEIGHTS": weights if "://" in weights or not weights else str(Path(weights).resolve()),
        "COG_TRITON_ENGINE": settings.cog_triton_engine or "",
        "SERVED_MODEL_NAME": settings.served_model_name or "",
        **{f"MOCK_{name.upper()}": str(v) for name, v in settings.mock_options.items()},
    }
    if settings.world_size:
        environment["WORLD_SIZE"] = str(settings.world_size)
    environment.setdefault("LOG_FORMAT", "console")
    if not verbose:
        environment.setdefault("COG_LOG_LEVEL", "error")
    return environment


def _paths(settings: Settings) -> dict[str, str]:
    """All paths that were set, absolute, but for programs by name; links stay."""
    given = ((name, getattr(settings, name)) for name in type(settings).model_fields)
    return {
        name.upper(): str(value.absolute())
        for name, value in given
        if isinstance(value, Path) and not (name == "mpirun" and len(value.parts) == 1)
    }


class CogServer:
    """A server on the public `sockets`, run until SIGINT or SIGTERM.

    SIGUSR1 tells that a rank which another launcher started has died: all requests are failed.
    """

    def __init__(
        self,
        settings: Settings,
        sockets: Mapping[str, socket.socket],
        max_concurrency: int,
        *,
        verbose: bool,
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._stops = 0
        self._rank_died = False
        self._wake = threading.Event()
        self._health = HealthClient(settings)
        self._environment = cog_environment(settings, max_concurrency, verbose=verbose)

    def run(self, echo: Callable[[str], None]) -> None:
        """Serve until SIGINT or SIGTERM; raises the coded error that the start failed with.

        `echo` gets status lines for the user.
        """
        settings = self._settings
        if settings.cog_triton_engine is None:
            require_image(settings.cog_triton_sm)
        require_usable(settings.work_dir)
        process_tuning.raise_open_files()
        echo(f"cog-triton {__version__}: starting; the first start unpacks the engine")
        started = time.monotonic()
        oom_kills = OomKills()
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        # Slurm sends it to every process; those that are started from here on ignore it.
        previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        process = reaper.spawn(
            [sys.executable, "-m", "cog_triton.front.server", *as_arguments(self._sockets)],
            grace=settings.drain_timeout + _EXIT_S,
            env=self._environment,
            cwd=cog_project("mock_cog_triton" if settings.cog_triton_engine else "runner"),
            pass_fds=[one.fileno() for one in self._sockets.values()],
        )
        signal.signal(signal.SIGUSR1, self._on_signal)
        try:
            with ProgressLine() as line:
                line.begin("starting Triton and loading the engine")
                self._wait_until_ready(process, echo)
            if not self._stops:
                seconds = time.monotonic() - started
                echo(ready_message(settings, seconds))
                self._watch(process, echo)
                echo("Stopping: running requests may end; once more stops at once")
            process.terminate()  # the server drains every API
            self._wait_for_exit(process)
        except errors.FrameworkError as error:
            if not (hint := oom_kills.hint()) or hint in error.detail:
                raise
            raise type(error)(f"{error.detail}{hint}") from error
        finally:
            process.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._rank_died = True
        else:
            self._stops += 1
        self._wake.set()

    def _wait_until_ready(self, process: reaper.Reaped, echo: Callable[[str], None]) -> None:
        processes = CogProcesses(process.process.pid)
        began = said = looked = time.monotonic()
        unanswered = 0
        while not self._stops:
            if (code := process.poll()) == 0:  # after POST /shutdown
                self._stops += 1
                return
            if code is not None:
                raise errors.TritonStartFailed(
                    f"the server exited with code {code} during start-up"
                )
            if (now := time.monotonic()) - looked >= _STOPPED_S:  # reads all of /proc
                looked = now
                if stopped := processes.stopped():
                    raise errors.TritonStartFailed(f"{stopped} during start-up")
            health = self._health.read()
            status = health.get("status")
            unanswered = unanswered + 1 if status == NO_ANSWER else 0
            if unanswered >= self._settings.cog_probe_failures:
                raise errors.TritonStartFailed("Cog stopped answering during start-up")
            if status == "SETUP_FAILED":
                logs = str(health.get("setup", {}).get("logs", ""))
                raise errors.from_text(logs) or errors.TritonStartFailed(
                    f"Cog's setup failed:\n{logs}"
                )
            if status == "READY":
                return
            if (now := time.monotonic()) - said >= _HEARTBEAT_S:
                said = now
                echo(still_starting(self._settings, now - began))
            self._wake.wait(_POLL_S)

    def _watch(self, process: reaper.Reaped, echo: Callable[[str], None]) -> None:
        """Watch Cog's health until it is to stop; raises what it cannot recover from."""
        watch = CogWatch(self._settings, process.process.pid, self._health)
        while not self._stops:
            if self._rank_died:  # of which the server may have heard, too, and exited
                watch.give_up("another rank has died (SIGUSR1)")
            if (code := process.poll()) == 0:  # after POST /shutdown
                return
            if code is not None:
                reason = f": {watch.failure}" if watch.failure else ""
                raise errors.TritonUnavailable(f"the server exited with code {code}{reason}")
            if line := watch.check():
                echo(line)
            self._wake.wait(self._settings.cog_probe_period)

    def _wait_for_exit(self, process: reaper.Reaped) -> None:
        """Wait for the end of a drain, not beyond a second signal."""
        deadline = time.monotonic() + self._settings.drain_timeout + _EXIT_S
        while process.poll() is None and self._stops < 2 and time.monotonic() < deadline:
            self._wake.clear()
            self._wake.wait(_POLL_S)
