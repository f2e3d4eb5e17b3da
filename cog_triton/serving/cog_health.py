"""Cog's health: reads /health-check, and decides when an unhealthy server has to end."""

from __future__ import annotations

from typing import Any

import httpx

from cog_triton import errors
from cog_triton.settings import url_host

_TIMEOUT_S = 5
_UNHEALTHY_S = 5.0


class HealthClient:
    """HTTP client of Cog's /health-check on `host` and `port`."""

    def __init__(self, host: str, port: int) -> None:
        self._url = f"http://{url_host(host)}:{port}/health-check"
        # Plain HTTP needs no certificates; a probe connects anew, for that is part of the answer.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=False, limits=limits)

    def read(self) -> dict[str, Any]:
        """The response's JSON object; empty if there is none."""
        try:
            health = self._http.get(self._url).raise_for_status().json()
        except (httpx.HTTPError, ValueError):
            return {}
        return health if isinstance(health, dict) else {}


class HealthMonitor:
    """State of a server that was ready at `now`; times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._healthy_at = now
        self.failure: errors.TritonUnavailable | None = None
        """Why requests fail now, while Triton is being restarted."""

    def update(self, health: dict[str, Any], now: float) -> str | None:
        """Take a health response; returns the line to show if the state has changed.

        Raises E2106 when Triton was given up, and E2105 when Cog stays unhealthy for any reason but
        a restart of Triton.
        """
        if health.get("status") not in ("UNHEALTHY", "DEFUNCT"):
            self._healthy_at = now
            recovered, self.failure = self.failure is not None, None
            return "Ready again" if recovered else None
        reason = str(health.get("user_healthcheck_error") or "Cog's worker has died")
        error = errors.from_text(reason)
        if isinstance(error, errors.TritonStartFailed):
            raise error
        if isinstance(error, errors.TritonUnavailable):  # Triton is being restarted
            self._healthy_at = now
            known, self.failure = self.failure, error
            return None if str(error) == str(known) else str(error)
        if now - self._healthy_at > _UNHEALTHY_S:
            raise errors.TritonUnavailable(f"{reason}; stopping")
        return None
