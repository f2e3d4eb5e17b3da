"""Servers for benchmarks and tests: on free ports, in a temporary work directory.

with mock_server(tps=100) as server:
    httpx.post(f"{server.url}/predictions", json={"input": {"n_output_tokens": 10}})
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import _resource_usage

from cog_triton.bench.options import TargetName
from cog_triton.system import reaper
from cog_triton.system.ports import free_ports

_START_S = 120
_STOP_S = 30
_RUNNER = Path(__file__).parents[1] / "runner"
_POLL_S = 0.02
PORTS = ("PORT", "OPENAI_PORT", "TRITON_HTTP_PORT", "TRITON_METRICS_PORT", "TRITON_GRPC_PORT")


@dataclass(frozen=True, slots=True)
class Api:
    """An API that is measured; `name` is for tables."""

    name: str
    target: TargetName


PREDICTIONS, CHAT = Api("/predictions", TargetName.COG), Api("/v1", TargetName.OPENAI)


@dataclass(frozen=True, slots=True)
class Server:
    """A ready server; `url`, `openai`, `triton` and `metrics` are base URLs, `grpc` host and port.

    It was started at `started`, and ready at `ready`, by time.monotonic().
    """

    pid: int
    log: Path
    url: str
    openai: str
    triton: str
    metrics: str
    grpc: str
    started: float
    ready: float

    def base(self, api: Api) -> str:
        """Base URL of an API."""
        return self.url if api == PREDICTIONS else self.openai

    @property
    def urls(self) -> dict[str, str]:
        """Base URLs by the first part of a path."""
        return {"predictions": self.url, "v1": self.openai, "v2": self.triton}

    def model(self) -> str:
        """Name of its base model in /v1."""
        with urlopen(f"{self.openai}/v1/models", timeout=_START_S) as answer:
            return str(json.load(answer)["data"][0]["id"])

    @property
    def pids(self) -> set[int]:
        """Its processes."""
        return {self.pid, *reaper.descendants(self.pid)}

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds so far of each part: see `_resource_usage.part_of`."""
        return _resource_usage.cpu_seconds(self.pid)

    def memory_bytes(self) -> dict[str, int]:
        """Memory in bytes of each part."""
        return _resource_usage.memory_bytes(self.pid)


def mock_server(
    *,
    tps: float = 0,
    step_clock: bool = False,
    environment: Mapping[str, str] | None = None,
    checkout: Path | None = None,
) -> AbstractContextManager[Server]:
    """``cog-triton serve`` with the mock engine (docs/mock.md); without `tps` at full rate.

    With `step_clock` all streams get their tokens together, as of an engine's batch.
    """
    if step_clock:
        environment = {"MOCK_STEP_MS": f"{1000 / tps:g}", **(environment or {})}
    own = ("--engine", "mock", f"--tps={tps:g}")
    return server(*own, environment=environment, checkout=checkout)


@contextmanager
def server(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    work_dir: Path | None = None,
    as_image: bool = False,
    checkout: Path | None = None,
    within: Callable[[list[str]], list[str]] = list,
) -> Iterator[Server]:
    """``cog-triton serve`` with these arguments; raises SystemExit with its log if it ends.

    `work_dir` is one to keep, where an engine stays unpacked for the next start. With `as_image`
    it is the command of the images instead, which takes its settings from `environment` alone.
    `checkout` is another one than this, which has been set up. `within` makes the command line that
    is run of the one that serves.
    """
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    own = {name: str(number) for name, number in ports.items()}
    url, openai, triton, metrics = (f"http://127.0.0.1:{ports[name]}" for name in PORTS[:4])
    python = str(checkout / ".venv" / "bin" / "python") if checkout else sys.executable
    command = [python, "-m", "cog_triton", "serve", *arguments]
    if as_image:
        command = [sys.executable, "-m", "cog_triton.serve"]
        # Cog starts its worker by the first Python of PATH.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own |= {"COG_HOST": "127.0.0.1", "TRITON_HOST": "127.0.0.1", "PATH": path}
        own |= {"COG_PREDICT_TYPE_STUB": "predict.py:Predictor", "COG_MAX_CONCURRENCY": "500"}
    with tempfile.TemporaryDirectory(prefix="cog-triton-bench-") as scratch:
        own |= {"COG_TRITON_WORK_DIR": str(work_dir or scratch), **(environment or {})}
        log = Path(scratch) / "serve.log"
        started = time.monotonic()
        with log.open("wb") as file:
            process = reaper.spawn(
                within(command),
                env={**os.environ, **own},
                cwd=_RUNNER if as_image else checkout,
                stdout=file,
                stderr=file,
            )
        try:
            _until_ready(process, url, log)
            pid, ready = process.process.pid, time.monotonic()
            grpc = f"127.0.0.1:{ports['TRITON_GRPC_PORT']}"
            yield Server(pid, log, url, openai, triton, metrics, grpc, started, ready)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()


def _until_ready(process: reaper.Reaped, url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while (said := status(url)) != "READY":
        if said == "SETUP_FAILED" or process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not become ready: {said}\n{log.read_text()[-4000:]}")
        time.sleep(_POLL_S)


def status(url: str) -> str:
    """Status of /health-check, as READY; "no answer" without one."""
    try:
        with urlopen(f"{url}/health-check", timeout=10) as answer:
            return str(json.load(answer)["status"])
    except (OSError, ValueError, KeyError, HTTPException):
        return "no answer"
