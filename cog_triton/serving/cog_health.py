"""Cog's health: its processes, /health-check, and when an unhealthy server has to end."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NoReturn

from cog_triton import errors
from cog_triton.settings import Settings, url_host
from cog_triton.settings.engine import SupervisionSettings
from cog_triton.system.process_state import process_state, with_descendants

NO_ANSWER = "NO_ANSWER"
"""Our own status, of a server that takes a connection and does not answer in time."""
_UNHEALTHY_S = 5.0
_EXIT_S = 15.0
_FIRST_TIMEOUT_S = 1.0
_ROLES = {
    b"\0cog_triton.front.server\0": "server",
    b"\0cog.server.http\0": "parent",
    b"_run_worker": "worker",
}
"""Names of the processes, by a part of their command line, where a NUL ends each word."""
_REAPER = b"reaper.py"
_TELL_S = 2.0
_POLL_S = 0.02
_ENDED = ("", "Z", "X")


def still_starting(settings: SupervisionSettings, seconds: float) -> str:
    """Line for a user who has waited `seconds` for Cog to be ready."""
    return (
        f"still starting after {seconds:.0f} s: the engine is unpacked and loaded, for which Triton"
        f" has {settings.triton_start_timeout:g} s (TRITON_START_TIMEOUT)"
    )


class HealthClient:
    """HTTP client of the server's /health-check, on the public PORT of this machine."""

    def __init__(self, settings: Settings) -> None:
        host, port = settings.public_ports["PORT"]
        # The certificate is for another name.
        self._tls = None if settings.tls_cert_file is None else ssl._create_unverified_context()
        self._address = (url_host(host).strip("[]"), port)
        self._timeout = settings.cog_probe_timeout
        self._has_answered = False

    def read(self) -> dict[str, Any]:
        """The response's JSON object; empty if there is none, status `NO_ANSWER` if it is late.

        The first one is never late: connections wait until the server has begun. If Cog does not
        start, the object is the server's own state.
        """
        try:
            succeeded, body = self._ask()
            health = json.loads(body)
        except TimeoutError:
            return {"status": NO_ANSWER} if self._has_answered else {}
        except (OSError, HTTPException, ValueError):
            return {}
        self._has_answered = True
        found = health if isinstance(health, dict) else {}
        if isinstance(errors.from_text(str(found.get("error"))), errors.Overloaded):
            return {"status": "BUSY"}  # MAX_CONNECTIONS of them await answers
        return dict(found.get("without_cog", found if succeeded else {}))

    def _ask(self) -> tuple[bool, bytes]:
        """Whether the status is 2xx, and the body; of a new connection, which is tested, too."""
        timeout = self._timeout if self._has_answered else min(_FIRST_TIMEOUT_S, self._timeout)
        if self._tls is None:
            connection = HTTPConnection(*self._address, timeout=timeout)
        else:
            connection = HTTPSConnection(*self._address, timeout=timeout, context=self._tls)
        try:
            connection.request("GET", "/health-check")
            response = connection.getresponse()
            return response.status // 100 == 2, response.read()
        finally:
            connection.close()


class HealthMonitor:
    """State of a server that was ready at `now`; times are seconds of one monotonic clock.

    COG_PROBE_FAILURES probes in a row may get no answer in COG_PROBE_TIMEOUT each; one that listens
    no more, as while it drains, may take DRAIN_TIMEOUT and 15 s to end.
    """

    def __init__(self, now: float, settings: SupervisionSettings) -> None:
        self._settings = settings
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
        if self._unanswered >= self._settings.cog_probe_failures:
            raise errors.TritonUnavailable(
                f"Cog did not answer {self._unanswered} health checks in a row within"
                f" {self._settings.cog_probe_timeout:g} s each (COG_PROBE_FAILURES,"
                " COG_PROBE_TIMEOUT); stopping"
            )

    def _check_exit(self, now: float) -> None:
        limit = self._settings.drain_timeout + _EXIT_S
        if now - self._listened_at > limit:
            raise errors.TritonUnavailable(
                f"Cog has not listened for {limit:g} s, and does not exit; stopping"
            )


class CogProcesses:
    """The server, Cog's parent and worker, and the server's reaper, from the process `root` on."""

    def __init__(self, root: int) -> None:
        self._root = root

    def stopped(self) -> str | None:
        """Describes a process that is stopped (SIGSTOP), None if none is."""
        for pid, role in self._roles().items():
            if process_state(pid) == "T":
                return f"Cog's {role} (process {pid}) was stopped"
        return None

    def fail_requests(self) -> None:
        """Have the server end its requests with E2105, and itself, even if it was stopped."""
        servers = [pid for pid, role in self._roles().items() if role == "server"]
        for pid in servers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + _TELL_S
        while any(process_state(pid) not in _ENDED for pid in servers):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _roles(self) -> dict[int, str]:
        """By process id; that of a reaper is to be the reaper of the process that has a role."""
        found: dict[int, str] = {}
        for pid in with_descendants(self._root):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                for part, role in _ROLES.items():
                    if part in line:
                        found[pid] = f"{role}'s reaper" if _REAPER in line else role
        return found


class CogWatch:
    """Watchdog of a Cog that is ready, below the process `root`; `health` has had its answers.

    Whoever started Cog calls `check` every COG_PROBE_PERIOD seconds, on any thread.
    """

    def __init__(self, settings: SupervisionSettings, root: int, health: HealthClient) -> None:
        self._health = health
        self._processes = CogProcesses(root)
        self._monitor = HealthMonitor(time.monotonic(), settings)

    @property
    def failure(self) -> errors.TritonUnavailable | None:
        """Why requests fail now, while Triton is being restarted."""
        return self._monitor.failure

    def check(self) -> str | None:
        """Look once; returns the line to show if the state has changed. Blocks for one probe.

        When Cog is lost, the server has failed running requests.

        Raises:
            TritonStartFailed: Triton was given up.
            TritonUnavailable: Cog is stopped, hangs, or is unhealthy for any other reason.
        """
        try:
            if stopped := self._processes.stopped():
                raise errors.TritonUnavailable(f"{stopped}; stopping")
            return self._monitor.update(self._health.read(), time.monotonic())
        except errors.TritonUnavailable:
            self._processes.fail_requests()
            raise

    def give_up(self, reason: str) -> NoReturn:
        """Fail running requests, and raise E2105."""
        self._processes.fail_requests()
        raise errors.TritonUnavailable(f"{reason}; stopping")
