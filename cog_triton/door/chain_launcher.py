"""Launch of backend chains: the command, environment and private ports of a Cog behind the door."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cog_triton.door.upstream import Chain, PrivatePorts, Upstream, Variant
from cog_triton.serving.triton_use import TRITON_USE_VARIABLE, TritonUseReport
from cog_triton.settings import Settings
from cog_triton.system import reaper

_EXIT_S = 15
_UNCHANGED = Variant()
_SECRETS = ("COG_TRITON_API_KEY", "OPENAI_API_KEY")
_LOOPBACK = "127.0.0.1"


class ChainLauncher:
    """Starts upstreams: a Cog server each, with private ports for the public ones in `names`."""

    def __init__(self, settings: Settings, names: Sequence[str], for_cog: Sequence[str]) -> None:
        """`for_cog` are arguments of cog.server.http."""
        self._settings = settings
        self._work_dir = settings.work_dir.resolve()
        self._names = names
        self._for_cog = for_cog
        self._started = 0

    def start(self, variant: Variant = _UNCHANGED) -> Upstream:
        """Start a chain; it is not ready yet. Raises OSError if that cannot be done."""
        self._started += 1
        name = f"engine-{self._started}"
        reserved = PrivatePorts(self._names)
        builds = "TRITON_HTTP_PORT" not in self._names
        drain_file = None if builds else self._work_dir / f"drain-{secrets.token_hex(8)}"
        use_file = Path(f"/dev/shm/cog_triton_{os.getpid()}_use_{secrets.token_hex(8)}")
        triton_use = None if drain_file is None else TritonUseReport.made(use_file)
        environment = {
            **cog_environment(self._settings, reserved.numbers),
            **variant.environment,
            "COG_TRITON_DRAIN_FILE": str(drain_file or ""),
            TRITON_USE_VARIABLE: str(use_file) if drain_file else "",
        }
        python = variant.python or sys.executable
        if variant.python is not None:  # coglet starts its worker as `python` of PATH
            path = environment.get("PATH", os.defpath)
            environment["PATH"] = f"{variant.python.parent}:{path}"
        environment = _with_direct_loopback(environment)
        try:
            process = reaper.spawn(
                [
                    *(str(python), "-m", "cog_triton.serving.coglet.http_server"),
                    *(*self._for_cog, "--host", _LOOPBACK),
                ],
                grace=self._settings.drain_timeout + _EXIT_S,
                env=environment,
                cwd=variant.directory,
            )
        except BaseException:
            reserved.close()
            raise
        chain = Chain(process, reserved, drain_file, environment, variant, triton_use)
        return Upstream(name, reserved.numbers, chain, self._settings.triton_start_timeout)


def cog_environment(settings: Settings, private: Mapping[str, int]) -> dict[str, str]:
    """The environment of a Cog behind the door: it and what it starts listen on `private` ports.

    Keys stay in the door.
    """
    return {
        **{name: value for name, value in os.environ.items() if name not in _SECRETS},
        "COG_HOST": _LOOPBACK,
        "TRITON_HOST": _LOOPBACK,
        "COG_TRITON_KEY_AT_DOOR": "true" if settings.api_key else "false",
        **{name: str(port) for name, port in private.items()},
    }


def _with_direct_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` in which no proxy is asked for 127.0.0.1, where coglet posts webhooks."""
    direct = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if "*" not in direct.split(","):
        direct = f"{direct},127.0.0.1".lstrip(",")
    return {**environment, "no_proxy": direct, "NO_PROXY": direct}
