"""The front door as a child process of ``cog-triton serve --triton-only``."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from cog_triton.settings import Settings
from cog_triton.system import ports, reaper

_CLOSE_S = 5.0
_POLL_S = 0.05


class TritonDoor:
    """The front door before a Triton that listens on private ports."""

    def __init__(self, settings: Settings) -> None:
        self._reserved = [ports.reserve() for _ in range(2)]
        http, metrics = (reserved.getsockname()[1] for reserved in self._reserved)
        self.triton_settings = settings.model_copy(
            update={
                "triton_host": "127.0.0.1",
                "triton_http_port": http,
                "triton_metrics_port": metrics,
            }
        )
        environment = {
            name: str(value)
            for name, value in (
                ("TRITON_HOST", settings.triton_host),
                ("TRITON_HTTP_PORT", settings.triton_http_port),
                ("TRITON_METRICS_PORT", settings.triton_metrics_port),
            )
        }
        self._process = reaper.spawn(
            [
                *(sys.executable, "-m", "cog_triton.door"),
                *("--beside-triton", str(http), str(metrics)),
            ],
            grace=settings.drain_timeout + _CLOSE_S,
            env={**os.environ, **environment},
        )
        self._drain_s = settings.drain_timeout

    def exit_code(self) -> int | None:
        """How the door ended, None while it is open."""
        return self._process.poll()

    async def drain(self) -> None:
        """Have it refuse new requests; returns once those that run have ended, and it with them."""
        self._process.terminate()
        deadline = time.monotonic() + self._drain_s + _CLOSE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """End it at once, and give its ports back."""
        self._process.kill()
        for reserved in self._reserved:
            reserved.close()
