"""Server under fault injection: ``cog-triton serve`` in a sandbox, and what is known of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import _servers

from cog_triton.system import reaper
from cog_triton.system.process_state import process_state, stat_fields
from faults import processes
from faults.processes import Held
from faults.sandbox import Sandbox, sandbox, unboxed

_READY_S, _POLL_S = 180.0, 0.05


class ServerFailure(RuntimeError):
    """A server that did not start, or did not become READY again; with the end of its log."""


@dataclass(frozen=True, slots=True)
class Start:
    """Arguments and environment of ``cog-triton serve``, or with `as_image` of an image."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    as_image: bool = False


class Target:
    """A running server; `ready_at` is when it became READY last."""

    def __init__(self, server: _servers.Server, box: Sandbox, start: Start) -> None:
        self.server, self.box, self.environment = server, box, start.environment
        self.urls = server.urls
        self.ready_at = server.ready
        below = (pid for pid in sorted(reaper.descendants(server.pid)) if pid != server.pid)
        self.pid = next(pid for pid in below if _parent(pid) == server.pid)
        """Process id of ``cog-triton serve``, which is below a reaper."""

    @property
    def has_ended(self) -> bool:
        """Whether ``cog-triton serve`` has ended."""
        return process_state(self.pid) in ("", "Z", "X")

    def inside(self, path: Path) -> Path:
        """`path` as the server sees it."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    @cached_property
    def _shared_memory(self) -> int:
        return os.open(self.inside(Path("/dev/shm")), os.O_RDONLY)

    def held(self) -> Held:
        """What the server holds at this moment."""
        return processes.held(self.pid, processes.shared_files(self._shared_memory))

    async def until_ready(self, seconds: float = _READY_S) -> None:
        """Wait for READY; raises ServerFailure. `ready_at` stays if it is READY already."""
        began = time.monotonic()
        while (said := await asyncio.to_thread(_servers.status, self.server.url)) != "READY":
            if self.has_ended:
                raise ServerFailure(f"the server ended: {self.tail()}")
            if time.monotonic() > began + seconds:
                raise ServerFailure(f"{said} for {seconds:g} s: {self.tail()}")
            await asyncio.sleep(_POLL_S)
        if time.monotonic() > began + _POLL_S:  # a connection may wait for the next server
            self.ready_at = time.monotonic()

    def engine_requests(self) -> int:
        """Requests that the engine itself says it has."""
        with urlopen(f"{self.server.metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        rows = [one for one in lines if one.startswith("nv_trt_llm_request_metrics{")]
        return sum(int(float(row.split()[-1])) for row in rows if '"active"' in row)

    def tail(self) -> str:
        """The end of its log."""
        return self.server.log.read_text("utf-8", "replace")[-1500:]

    def close(self) -> None:
        """Release what this object holds."""
        if "_shared_memory" in self.__dict__:
            os.close(self._shared_memory)


@contextmanager
def served(start: Start, log: Path | None = None, *, boxed: bool = True) -> Iterator[Target]:
    """A READY server, whose log is added to `log` at the end; in a sandbox if `boxed`."""
    with (
        TemporaryDirectory(prefix="cog-triton-faults-") as directory,
        sandbox(Path(directory)) if boxed else nullcontext(unboxed(Path(directory))) as box,
    ):
        try:
            with _servers.server(
                *start.arguments,
                environment=start.environment,
                work_dir=box.work_dir,
                as_image=start.as_image,
                within=box.command,
            ) as server:
                target = Target(server, box, start)
                try:
                    yield target
                finally:
                    target.close()
                    if log is not None:
                        log.parent.mkdir(parents=True, exist_ok=True)
                        with log.open("ab") as file:
                            file.write(server.log.read_bytes())
        except SystemExit as error:
            raise ServerFailure(str(error)) from error


def _parent(pid: int) -> int:
    return int(stat_fields(Path(f"/proc/{pid}/stat"))[1])
