"""A server of its own for a benchmark or a test: on free ports, in a directory that goes with it.

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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from cog_triton import reaper
from cog_triton.settings import free_ports

_START_S = 120
_STOP_S = 30
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    """A ``cog-triton serve`` that is ready; `openai`, `triton` and `metrics` are base URLs, too."""

    pid: int
    log: Path
    url: str
    openai: str
    triton: str
    metrics: str

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of each part: cog, tritonserver, the stub of each model, and others."""
        used: dict[str, float] = {}
        for pid in {self.pid, *reaper.descendants(self.pid)}:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            part = _part(words)
            used[part] = used.get(part, 0.0) + (int(stat[11]) + int(stat[12])) / _TICKS
        return used


def mock_server(
    *arguments: str, tps: float = 0, environment: dict[str, str] | None = None
) -> AbstractContextManager[Server]:
    """The mock engine behind everything, flat out unless told otherwise; see docs/mock.md."""
    return server("--engine", "mock", f"--tps={tps:g}", *arguments, environment=environment)


@contextmanager
def server(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """``cog-triton serve`` with these arguments; raises SystemExit with its log if it ends."""
    port, openai, http, grpc, metrics = free_ports(5)
    ports = {
        "port": port,
        "openai-port": openai,
        "triton-http-port": http,
        "triton-grpc-port": grpc,
        "triton-metrics-port": metrics,
    }
    with tempfile.TemporaryDirectory(prefix="cog-triton-bench-") as scratch:
        path = Path(scratch) / "serve.log"
        with path.open("wb") as log:
            process = reaper.spawn(
                [sys.executable, "-m", "cog_triton", "serve", *arguments]
                + [f"--{name}={number}" for name, number in ports.items()],
                env={**os.environ, "COG_TRITON_WORK_DIR": scratch, **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        urls = [f"http://127.0.0.1:{number}" for number in (port, openai, http, metrics)]
        try:
            _until_ready(process, urls[0], path)
            yield Server(process.process.pid, path, *urls)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()


def _until_ready(process: reaper.Reaped, url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urlopen(f"{url}/health-check", timeout=5) as answer:
                if json.load(answer)["status"] == "READY":
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"cog-triton serve did not become ready:\n{log.read_text()}")


def _part(words: list[str]) -> str:
    program = Path(words[0]).name
    if program.endswith("_stub"):
        return f"stub {Path(words[1]).parent.parent.name}"
    if program == "tritonserver":
        return program
    if any("cog.server.http" in word or "coglet" in word for word in words):
        return "cog"
    return "other"
