"""Cog's health: reads /health-check, and decides when an unhealthy server has to end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

from cog_triton import errors
from cog_triton.settings import url_host
from cog_triton.settings.engine import SupervisionSettings

NO_ANSWER = "NO_ANSWER"
"""Our own status, of a server that takes a connection and does not answer in time."""
_UNHEALTHY_S = 5.0
_EXIT_S = 15.0
_PARENT_TIMEOUT_S = 2.0


def still_starting(settings: SupervisionSettings, seconds: float) -> str:
    """Line for a user who has waited `seconds` for Cog to be ready."""
    return (
        f"still starting after {seconds:.0f} s: the engine is unpacked and loaded, for which Triton"
        f" has {settings.triton_start_timeout:g} s (TRITON_START_TIMEOUT)"
    )


class HealthClient:
    """HTTP client of Cog's /health-check on `host` and `port`; `timeout` is in seconds."""

    def __init__(self, host: str, port: int, timeout: float = 5.0) -> None:
        self._address = (url_host(host).strip("[]"), port)
        self._timeout = timeout

    def read(self) -> dict[str, Any]:
        """The response's JSON object; empty if there is none, status `NO_ANSWER` if it is late."""
        try:
            answered, body = self._ask("GET", "/health-check", self._timeout)
            health = json.loads(body) if answered else {}
        except TimeoutError:
            return {"status": NO_ANSWER}
        except (OSError, HTTPException, ValueError):
            return {}
        return health if isinstance(health, dict) else {}

    def parent_answers(self) -> bool:
        """Whether Cog's parent process answers, on a path that its worker has no part in.

        The front door lets HEAD of it pass without a key, so that this is not its own answer.
        """
        try:
            return self._ask("HEAD", "/", _PARENT_TIMEOUT_S)[0]
        except (OSError, HTTPException):
            return False

    def _ask(self, method: str, path: str, timeout: float) -> tuple[bool, bytes]:
        """Whether the status is 2xx, and the body; connects anew, as that is part of the answer."""
        connection = HTTPConnection(*self._address, timeout=timeout)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status // 100 == 2, response.read()
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """How long a server may go without an answer.

    `failures` probes in a row may get none in `timeout` seconds each; one that listens no more, as
    while it drains, may take `exit_s` seconds to end.
    """

    failures: int = 3
    timeout: float = 5.0
    exit_s: float = 40.0

    @classmethod
    def of(cls, settings: SupervisionSettings) -> HealthLimits:
        """The limits that the settings ask for."""
        return cls(
            settings.cog_probe_failures,
            settings.cog_probe_timeout,
            settings.drain_timeout + _EXIT_S,
        )


class HealthMonitor:
    """State of a server that was ready at `now`; times are seconds of one monotonic clock."""

    def __init__(self, now: float, limits: HealthLimits = HealthLimits()) -> None:
        self._limits = limits
        self._healthy_at = now
        self._listened_at = now
        self._unanswered = 0
        self.failure: errors.TritonUnavailable | None = None
        """Why requests fail now, while Triton is being restarted."""

    def update(self, health: dict[str, Any], now: float) -> str | None:
        """Take a health response; returns the line to show if the state has changed.

        Raises E2106 when Triton was given up, and E2105 when Cog does not answer, or stays
        unhealthy for any reason but a restart of Triton.
        """
        status = health.get("status")
        if status == NO_ANSWER:
            self._count_no_answer()
            return None
        if not health:
            self._check_exit(now)
            return None
        self._listened_at = now
        if status not in ("UNHEALTHY", "DEFUNCT"):
            self._healthy_at, self._unanswered = now, 0
            recovered, self.failure = self.failure is not None, None
            return "Ready again" if recovered else None
        reason = str(health.get("user_healthcheck_error") or "Cog's worker has died")
        error = errors.from_text(reason)
        if isinstance(error, errors.TritonStartFailed):
            raise error
        if isinstance(error, errors.TritonUnavailable):  # Triton is being restarted
            self._healthy_at, self._unanswered = now, 0
            known, self.failure = self.failure, error
            return None if str(error) == str(known) else str(error)
        if now - self._healthy_at > _UNHEALTHY_S:
            raise errors.TritonUnavailable(f"{reason}; stopping")
        return None

    def _count_no_answer(self) -> None:
        self._unanswered += 1
        if self._unanswered >= self._limits.failures:
            raise errors.TritonUnavailable(
                f"Cog did not answer {self._unanswered} health checks in a row within"
                f" {self._limits.timeout:g} s each (COG_PROBE_FAILURES, COG_PROBE_TIMEOUT);"
                " stopping"
            )

    def _check_exit(self, now: float) -> None:
        if now - self._listened_at > self._limits.exit_s:
            raise errors.TritonUnavailable(
                f"Cog has not listened for {self._limits.exit_s:g} s, and does not exit; stopping"
            )
