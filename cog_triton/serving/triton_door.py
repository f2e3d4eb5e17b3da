"""The front door as a child process of ``cog-triton serve --triton-only``."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from cog_triton.settings import Settings
from cog_triton.system import ports, reaper

_CLOSE_S = 5.0


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
                "triton_grpc_host": settings.triton_host if settings.triton_grpc_public else None,
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
            env={**os.environ, **environment},
        )

    def exit_code(self) -> int | None:
        """How the door ended, None while it is open."""
        return self._process.poll()

    def close(self) -> None:
        """End it, and give its ports back."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._process.kill()
        for reserved in self._reserved:
            reserved.close()
