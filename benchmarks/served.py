"""Server under test of the soak runs, and the resources that its processes hold."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import httpx

from cog_triton.system import reaper
from cog_triton.system.ports import free_ports


@dataclass(frozen=True, slots=True)
class Counts:
    """Processes, threads, files and memory of a server's process tree."""

    processes: int
    shared_memory: int
    ports: int
    descriptors: int

    def __str__(self) -> str:
        return (
            f"{self.processes} processes, {self.shared_memory} in /dev/shm,"
            f" {self.ports} ports, {self.descriptors} descriptors"
        )

    def within(self, other: Counts) -> bool:
        """Whether no count exceeds that of `other`."""
        return all(mine <= its for mine, its in zip(astuple(self), astuple(other), strict=True))


class Server:
    """One ``cog-triton serve`` on ports of its own; `triton` is the URL of Triton's own API."""

    def __init__(
        self, work_dir: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """`arguments` are an engine, or options of the command."""
        self.port, self.openai_port, *triton = free_ports(5)
        names = ("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT")
        ports = dict(zip(names, map(str, triton), strict=True))
        ports["OPENAI_PORT"] = str(self.openai_port)
        self.triton = f"http://127.0.0.1:{triton[0]}"
        self.log = Path(work_dir) / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cog_triton", "serve", *arguments, f"--port={self.port}"],
                env={**os.environ, **ports, "COG_TRITON_WORK_DIR": work_dir, **(environment or {})},
                stdout=log,
                stderr=log,
            )

    @property
    def pids(self) -> set[int]:
        return {self.process.pid, *reaper.descendants(self.process.pid)}

    def pid_of(self, program: str) -> int:
        """Process id of tritonserver, or of a model's stub; 0 if there is none."""
        for pid in self.pids:
            words = read(pid, "cmdline").decode().split("\0")
            if program == "tritonserver" and words[0].endswith("/bin/tritonserver"):
                return pid
            if words[0].endswith("_stub") and f"/{program}/1/" in words[1]:
                return pid
        return 0

    def counts(self) -> Counts:
        pids = self.pids
        descriptors = [link for pid in pids for link in _links(pid)]
        sockets = {
            f"socket:[{line.split()[9]}]"
            for table in ("/proc/net/tcp", "/proc/net/tcp6")
            for line in Path(table).read_text().splitlines()
            if line.split()[3] == "0A"
        }
        # The names of Triton's memory begin with the process that started Triton.
        memory = [path for path in Path("/dev/shm").iterdir() if path.name.startswith("cog_triton")]
        ours = [path for path in memory if int(path.name.split("_")[2]) in pids]
        return Counts(len(pids), len(ours), len(sockets & set(descriptors)), len(descriptors))

    async def until_ready(self, http: httpx.AsyncClient) -> None:
        """Wait until predictions are served; raises SystemExit with the log if the server ends."""
        for _ in range(600):
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended:\n{self.log.read_text()}")
            if await self.ready(http):
                return
            await asyncio.sleep(0.2)
        raise SystemExit(f"the server was not ready in time:\n{self.log.read_text()}")

    async def model(self, http: httpx.AsyncClient) -> str:
        """Name of the model in the OpenAI API."""
        listed = await http.get(f"http://127.0.0.1:{self.openai_port}/v1/models")
        return str(listed.json()["data"][0]["id"])

    async def ready(self, http: httpx.AsyncClient) -> bool:
        try:
            answer = await http.get(f"http://127.0.0.1:{self.port}/health-check", timeout=10)
        except httpx.TransportError:
            return False
        return bool(answer.json()["status"] == "READY")


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _links(pid: int) -> list[str]:
    links = []
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                links.append(str(entry.readlink()))
    return links
