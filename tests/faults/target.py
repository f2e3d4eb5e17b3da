"""Server under fault injection: ``cog-triton serve`` in a sandbox, and what is known of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from _load import QuickAckClient

from cog_triton.bench.http_client import BufferedResponse, TransportError, encode_request
from cog_triton.system.ports import free_ports
from faults import processes
from faults.processes import Held
from faults.sandbox import Sandbox, sandbox

_READY_S, _STOP_S, _POLL_S = 180.0, 60.0, 0.05
_PORTS = ("PORT", "OPENAI_PORT", "TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT")


class ServerFailure(RuntimeError):
    """A server that did not start, or did not become READY again; with the end of its log."""


@dataclass(frozen=True, slots=True)
class Start:
    """Arguments and environment of ``cog-triton serve``; `binds` as of `Sandbox.command`."""

    arguments: list[str]
    environment: dict[str, str]
    binds: dict[Path, Path] = field(default_factory=dict)


class Target:
    """A running server; `root` and `disk` are its own view of / and of its work directory."""

    def __init__(
        self,
        box: Sandbox,
        process: subprocess.Popen[bytes],
        environment: Mapping[str, str],
        ports: Mapping[str, int],
        log: Path,
    ) -> None:
        self.box, self.process, self.log = box, process, log
        self.environment = environment
        base = {name: f"http://127.0.0.1:{number}" for name, number in ports.items()}
        self.url, self.metrics_url = base["PORT"], base["TRITON_METRICS_PORT"]
        self.urls = {
            "predictions": base["PORT"],
            "v1": base["OPENAI_PORT"],
            "v2": base["TRITON_HTTP_PORT"],
        }
        self._client = QuickAckClient(5)
        self._shared_memory = -1
        self.ready_at = 0.0

    @property
    def pid(self) -> int:
        """Process id of ``cog-triton serve``."""
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        """Whether ``cog-triton serve`` has ended."""
        return self.process.poll() is not None

    def inside(self, path: Path) -> Path:
        """`path` as the server sees it."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    @property
    def shared_memory(self) -> int:
        """Descriptor of the server's /dev/shm, which outlives the server."""
        if self._shared_memory < 0:
            self._shared_memory = os.open(self.inside(Path("/dev/shm")), os.O_RDONLY)
        return self._shared_memory

    def held(self) -> Held:
        """What the server holds at this moment."""
        return processes.held(self.pid, processes.shared_files(self.shared_memory))

    async def health(self) -> str:
        """READY, UNHEALTHY, ...; UNREACHABLE without an answer."""
        answer = BufferedResponse()
        request = encode_request("GET", f"{self.url}/health-check", {})
        with suppress(TransportError, OSError, ValueError):
            await self._client.send(*request, answer)
            return str(json.loads(answer.text)["status"])
        return "UNREACHABLE"

    async def until_ready(self, seconds: float = _READY_S) -> None:
        """Wait for READY; raises ServerFailure. `ready_at` is kept if it is READY already."""
        began = time.monotonic()
        while (said := await self.health()) != "READY":
            if self.has_ended:
                raise ServerFailure(f"the server ended with {self.process.poll()}: {self.tail()}")
            if time.monotonic() > began + seconds:
                raise ServerFailure(f"{said} for {seconds:g} s: {self.tail()}")
            await asyncio.sleep(_POLL_S)
        if time.monotonic() > began + _POLL_S:  # a connection may wait for the next server
            self.ready_at = time.monotonic()

    async def model(self) -> str:
        """Name of its base model in /v1."""
        answer = await self._client.fetch("GET", f"{self.urls['v1']}/v1/models", {})
        return str(json.loads(answer.text)["data"][0]["id"])

    async def engine_requests(self) -> int:
        """Requests that the engine itself says it has."""
        answer = await self._client.fetch("GET", f"{self.metrics_url}/metrics", {})
        lines = answer.text.decode().splitlines()
        rows = [one for one in lines if one.startswith("nv_trt_llm_request_metrics{")]
        return sum(int(float(row.split()[-1])) for row in rows if '"active"' in row)

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text("utf-8", "replace")[-1500:]

    async def stop(self) -> Held:
        """Stop it if it runs; returns what is left of it."""
        self.process.terminate()
        deadline = time.monotonic() + _STOP_S
        while (left := processes.marked(self.box.work_dir)) and time.monotonic() < deadline:
            self.process.poll()
            await asyncio.sleep(_POLL_S)
        found = Held(len(left), processes.shared_files(self.shared_memory), 0, 0)
        for pid in left:
            processes.send(pid, signal.SIGKILL)
        self.process.wait()
        return found

    def close(self) -> None:
        """Release what this object holds."""
        self._client.close()
        if self._shared_memory >= 0:
            os.close(self._shared_memory)


@asynccontextmanager
async def served(start: Start, keep_log: Path) -> AsyncIterator[Target]:
    """A READY server in a sandbox of its own; `keep_log` gets its log at the end."""
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    with (
        tempfile.TemporaryDirectory(prefix="cog-triton-faults-") as directory,
        sandbox(Path(directory)) as box,
    ):
        log = Path(directory) / "serve.log"
        own = {name: str(number) for name, number in ports.items()}
        own["COG_TRITON_WORK_DIR"] = str(box.work_dir)
        words = [sys.executable, "-m", "cog_triton", "serve", *start.arguments]
        with log.open("wb") as file:
            process = subprocess.Popen(
                box.command(words, start.binds),
                env={**os.environ, **own, **start.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        target = Target(box, process, start.environment, ports, log)
        try:
            await target.until_ready()
            yield target
        finally:
            with suppress(OSError):
                await target.stop()
            target.close()
            with keep_log.open("ab") as kept:
                kept.write(log.read_bytes())
