"""``cog-triton serve``: Cog's own HTTP server on the runner project, started and watched."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from cog_triton import __version__, errors
from cog_triton.artifact.compatibility import require_gpu
from cog_triton.engines.mock.mock_options import MockOptions
from cog_triton.settings import Settings, url_host
from cog_triton.system import reaper
from cog_triton.system.paths import cog_project
from cog_triton.system.ports import require_free

_POLL_S = 0.05
_WATCH_S = 1.0
_UNHEALTHY_S = 5.0
_WEBHOOKS_S = 0.5
_EXIT_S = 15


def default_concurrency(settings: Settings) -> int:
    """Predictions Cog accepts at once: of the mock's all, and as many that wait or are refused."""
    if settings.cog_triton_engine is None:
        return 256
    return 2 * int(settings.mock_max_batch_size or MockOptions().max_batch_size)


class CogServer:
    """Cog on one address, with the settings of everything below it in its environment."""

    def __init__(
        self, settings: Settings, host: str, port: int, max_concurrency: int, *, verbose: bool
    ) -> None:
        self._settings = settings
        self._host = host
        self._port = port
        self._max_concurrency = max_concurrency
        self._verbose = verbose
        self._stops = 0
        self._wake = threading.Event()
        self._healthy_at = 0.0
        self._trouble = ""
        # Plain HTTP needs no certificates; a probe connects anew, for that is part of the answer.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(timeout=5, trust_env=False, verify=False, limits=limits)
        self._drain_file = settings.work_dir.resolve() / f"drain-{os.getpid()}"

    def run(self, say: Callable[[str], None]) -> None:
        """Serve until SIGINT or SIGTERM; raises what made the start fail.

        `say` gets one line for each thing a person wants to know.
        """
        if self._settings.cog_triton_engine is None:
            require_gpu(self._settings.cog_triton_sm)
        self._require_free_ports()
        say(f"cog-triton {__version__}: starting; the first start unpacks the engine")
        started = time.monotonic()
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        process = reaper.spawn(
            [sys.executable, "-m", "cog_triton.serving.coglet.http_server", "--host", self._host],
            grace=self._settings.drain_timeout + _EXIT_S,
            env=self._environment(),
            cwd=cog_project("mock_cog_triton" if self._settings.cog_triton_engine else "runner"),
        )
        try:
            self._until_ready(process)
            if not self._stops:
                say(self._ready_line(time.monotonic() - started))
                self._until_stopped(process, say)
                self._drain(process, say)
            self._end(process)
        finally:
            process.kill()
            self._drain_file.unlink(missing_ok=True)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1
        self._wake.set()

    def _require_free_ports(self) -> None:
        require_free(
            {
                "PORT": (self._host, self._port),
                **self._settings.http_ports,
                **self._settings.triton_ports,
            }
        )

    def _environment(self) -> dict[str, str]:
        settings = self._settings
        environment = {
            **os.environ,
            # coglet starts its worker as `python` of PATH, not as this interpreter.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "COG_HOST": self._host,
            "PORT": str(self._port),
            "OPENAI_PORT": str(settings.openai_port or ""),
            "METRICS_PORT": str(settings.metrics_port or ""),
            "COG_PREDICT_TYPE_STUB": "predict.py:Predictor",
            "COG_MAX_CONCURRENCY": str(self._max_concurrency),
            # coglet answers 409, with slots free, when two of its threads look for one at once.
            "TOKIO_WORKER_THREADS": "1",
            "TRITON_HOST": settings.triton_host,
            "TRITON_HTTP_PORT": str(settings.triton_http_port),
            "TRITON_GRPC_PORT": str(settings.triton_grpc_port),
            "TRITON_METRICS_PORT": str(settings.triton_metrics_port),
            "COG_TRITON_WORK_DIR": str(settings.work_dir.resolve()),
            "COG_TRITON_DRAIN_FILE": str(self._drain_file),
            "ENGINE_DIR": str(settings.engine_dir.resolve()),
            "COG_TRITON_ENGINE": settings.cog_triton_engine or "",
            **{f"MOCK_{name.upper()}": str(v) for name, v in settings.mock_options.items()},
        }
        if settings.cog_weights:
            weights = settings.cog_weights
            environment["COG_WEIGHTS"] = (
                weights if "://" in weights else str(Path(weights).resolve())
            )
        if settings.cog_triton_config:
            environment["COG_TRITON_CONFIG"] = str(settings.cog_triton_config.resolve())
        if settings.world_size:
            environment["WORLD_SIZE"] = str(settings.world_size)
        if settings.tritonserver:
            environment["TRITONSERVER"] = str(settings.tritonserver.resolve())
        if not self._verbose:
            environment.setdefault("COG_LOG_LEVEL", "error")
            environment.setdefault("LOG_FORMAT", "console")
        if not sys.stdout.isatty():
            environment.setdefault("NO_COLOR", "1")
        return environment

    def _until_ready(self, process: reaper.Reaped) -> None:
        while not self._stops:
            code = process.poll()
            if code is not None:
                raise errors.TritonStartFailed(f"Cog exited with code {code} during start-up")
            health = self._health()
            status = health.get("status")
            if status == "SETUP_FAILED":
                logs = str(health.get("setup", {}).get("logs", ""))
                raise errors.from_text(logs) or errors.TritonStartFailed(
                    f"Cog's setup failed:\n{logs}"
                )
            if status == "READY":
                return
            self._wake.wait(_POLL_S)

    def _until_stopped(self, process: reaper.Reaped, say: Callable[[str], None]) -> None:
        self._healthy_at = time.monotonic()
        while not self._stops:
            if (code := process.poll()) is not None:
                raise errors.TritonUnavailable(f"Cog exited with code {code}{self._trouble}")
            self._watch_health(say)
            self._wake.wait(_WATCH_S)

    def _drain(self, process: reaper.Reaped, say: Callable[[str], None]) -> None:
        """Let what runs end: Cog itself would wait for as long as it takes, but not for all."""
        say("Stopping: running predictions may end; once more stops at once")
        self._drain_file.parent.mkdir(parents=True, exist_ok=True)
        self._drain_file.touch()
        if self._wait(
            lambda: not self._drain_file.exists() or process.poll() is not None,
            self._settings.drain_timeout + _EXIT_S,
        ):
            self._wait(lambda: process.poll() is not None, _WEBHOOKS_S)

    def _end(self, process: reaper.Reaped) -> None:
        process.terminate()
        self._wait(lambda: process.poll() is not None, _EXIT_S)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for `condition`, but no longer than `seconds` or to the second request to stop."""
        deadline = time.monotonic() + seconds
        while not (met := condition()) and self._stops < 2 and time.monotonic() < deadline:
            self._wake.clear()
            self._wake.wait(_POLL_S)
        return met

    def _watch_health(self, say: Callable[[str], None]) -> None:
        """Tell what changes; raise what nothing here heals."""
        health = self._health()
        if health.get("status") not in ("UNHEALTHY", "DEFUNCT"):
            self._healthy_at = time.monotonic()
            if self._trouble:
                say("Ready again")
                self._trouble = ""
            return
        reason = str(health.get("user_healthcheck_error") or "Cog's worker has died")
        error = errors.from_text(reason)
        if isinstance(error, errors.TritonStartFailed):
            raise error
        if isinstance(error, errors.TritonUnavailable):  # Triton is being restarted
            self._healthy_at = time.monotonic()
            if self._trouble != f": {error}":
                say(str(error))
                self._trouble = f": {error}"
        elif time.monotonic() - self._healthy_at > _UNHEALTHY_S:
            raise errors.TritonUnavailable(f"{reason}; stopping")

    def _health(self) -> dict[str, Any]:
        url = f"http://{url_host(self._host)}:{self._port}/health-check"
        try:
            health = self._http.get(url).raise_for_status().json()
        except (httpx.HTTPError, ValueError):
            return {}
        return health if isinstance(health, dict) else {}

    def _ready_line(self, seconds: float) -> str:
        settings = self._settings
        host = url_host(self._host)
        base = f"http://{'localhost' if host == '127.0.0.1' else host}"
        openai = f"OpenAI API on {settings.openai_port}, " if settings.openai_port else ""
        return (
            f"Ready in {seconds:.1f} s ({openai}Triton on {settings.triton_http_port},"
            f" {settings.triton_grpc_port}, {settings.triton_metrics_port}). Try:\n"
            f"curl -sN -XPOST {base}:{self._port}/predictions"
            " -H 'Content-Type: application/json' -H 'Accept: text/event-stream'"
            """ -d '{"input":{"prompt":"What is the capital of France?"}}'"""
        )
