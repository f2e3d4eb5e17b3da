"""What is behind the gates: Cog, Triton and the server's own predictions.

The state of Cog is read from its /health-check, for answers of the front in its place; the names of
the inputs that it takes from its /openapi.json, which never changes. Cog says READY when its worker
is set up; that a prediction passes through Cog itself is shown by one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cog_triton import errors
from cog_triton.front.json_body import member
from cog_triton.front.message import Answer, json_answer
from cog_triton.front.pass_through import ask
from cog_triton.serving.tenants import Tenant

_STARTING = ("STARTING", "UNKNOWN", None)
_HEALTH, _SCHEMA = b"/health-check", b"/openapi.json"
_STARTING_PERIOD_S = 0.05
_PERIOD_S = 0.5
_TIMEOUT_S = 10.0
_FRESH_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 60.0
_CHECKS = 4
_LOST_S = 1.0
_CHECK = json.dumps({"input": {"prompt": "a", "max_tokens": 1}}).encode()
_OK, _ACCEPTED = 200, 202
_REFUSED = (400, 422)
_UNAVAILABLE = (409, 503)
_FAILED = "SETUP_FAILED"
_READY = ("READY", "BUSY")
_log = logging.getLogger(__name__)


class CogState:
    """Whether Cog listens, and whether it serves predictions; `watch` keeps it current."""

    def __init__(self, port: int, check_id: str | None = None, start_timeout: float = 0.0) -> None:
        """With `check_id`, it is READY once a prediction of this id has passed through Cog.

        Several may be tried, in `start_timeout` seconds together, or 60 s each if that is longer.
        """
        self._port = port
        self._check_id = check_id
        self._check_timeout = max(_CHECK_TIMEOUT_S, start_timeout / _CHECKS)
        self._checks = self._slow_checks = 0
        self._withheld: dict[str, Any] | None = None if check_id is None else {"status": "STARTING"}
        self._inputs: frozenset[str] = frozenset()
        self.schema: bytes | None = None
        """Cog's /openapi.json, once it was read."""
        self.listens = False
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once predictions are served, or with the error that Cog's start has failed with."""
        self.on_loss: Callable[[str, bool], None] = lambda reason, late: None
        """Called with the reason if Cog has failed, and whether its answers are only late."""
        self._lost_at = math.inf
        self.failure: errors.CogTritonError | None
        """Why predictions are not served; None if they are."""
        self._take({})

    async def require_serving(self) -> None:
        """Raise E2105 while predictions are not served, with the reason."""
        if self.failure is not None:  # a client may have seen READY since
            with suppress(OSError, ValueError, asyncio.TimeoutError):
                self._take(await asyncio.wait_for(self._read(), _FRESH_TIMEOUT_S))
        if self.failure is not None:
            raise self.failure

    def require_checked(self) -> None:
        """Raise E2105 or E2106 until a prediction has passed through Cog."""
        if self._withheld is not None and self.failure is not None:
            raise self.failure

    def revise_health(self, status: int, body: bytes) -> Answer | None:
        """The answer in place of Cog's READY while no prediction has passed through Cog.

        An error begins with its code, without Cog's words before it.
        """
        if self._withheld is not None and member(body, "status") in _READY:
            return json_answer(status, self._withheld)
        if error := errors.from_text(str(member(body, "user_healthcheck_error"))):
            return json_answer(status, {**json.loads(body), "user_healthcheck_error": str(error)})
        return None

    async def input_names(self) -> frozenset[str]:
        """Names of the inputs of a prediction; none if Cog does not tell."""
        if self.schema is None:
            with suppress(OSError, ValueError, asyncio.TimeoutError):
                asking = ask(self._port, b"GET", _SCHEMA)
                status, schema = await asyncio.wait_for(asking, _FRESH_TIMEOUT_S)
                if status == _OK:
                    self.schema, self._inputs = schema, _properties(schema)
        return self._inputs

    async def watch(self) -> None:
        """Read the state again and again, until cancelled."""
        while True:
            try:
                health = await asyncio.wait_for(self._read(), _TIMEOUT_S)
                if health.get("status") in _READY:
                    await self.input_names()  # so that no prediction waits for them
                    if self._check_id is not None:
                        await self._check(self._check_id)
                self._take(health)
            except TimeoutError:
                reason = f"Cog has not answered for {_TIMEOUT_S:g} s"
                self.failure = errors.TritonUnavailable(f"{reason}; try again")
                self.on_loss(reason, True)
            except (OSError, ValueError):
                pass  # it does not listen yet, or was cut short: the next answer counts
            await asyncio.sleep(_STARTING_PERIOD_S if self.failure else _PERIOD_S)

    async def _read(self) -> dict[str, Any]:
        _, body = await ask(self._port, b"GET", _HEALTH)
        self.listens = True
        return dict(json.loads(body))

    async def _check(self, prediction_id: str) -> None:
        """Send one small prediction, of an id that Cog does not know yet.

        What a restart of Triton explains is tried again; so is a slow answer, a few times.
        """
        path = f"/predictions/{prediction_id}" + (f".{self._checks}" if self._checks else "")
        self._checks += 1
        try:
            asking = ask(self._port, b"PUT", path.encode(), body=_CHECK)
            status, body = await asyncio.wait_for(asking, self._check_timeout)
            answer = json.loads(body) if status == 200 else {"error": f"HTTP status {status}"}
        except TimeoutError:
            status, answer = 0, {"error": f"no answer within {self._check_timeout:g} s"}
        reason = str(answer.get("error"))
        known = errors.from_text(reason)
        if status in _UNAVAILABLE or isinstance(known, errors.TritonUnavailable):
            return
        if status in (0, _ACCEPTED) or isinstance(known, errors.TritonTimeout):
            self._slow_checks += 1
            _log.warning("prediction %d through Cog at the start: %s", self._checks, reason)
            if self._slow_checks < _CHECKS:
                return
        self._check_id = self._withheld = None
        # A user error is of an older release, of an engine that makes embeddings alone perhaps.
        if status in _REFUSED or isinstance(known, errors.UserError):
            _log.warning("the first prediction has passed through Cog, refused: %s", reason)
        elif answer.get("status") != "succeeded":
            error = errors.TritonStartFailed(f"the first prediction through Cog failed: {reason}")
            _log.error("%s", error)
            self._withheld = {"status": _FAILED, "setup": {"logs": str(error)}}

    def _take(self, health: dict[str, Any]) -> None:
        if health.get("status") in _READY:
            health = self._withheld or health
        self.health = health
        """Cog's last answer."""
        status = health.get("status")
        reason = str(health.get("user_healthcheck_error") or "")
        self.failure = None  # what our own health check says is said of each prediction, too
        if status == _FAILED:
            logs = str(health.get("setup", {}).get("logs", ""))
            self.failure = errors.from_text(logs) or errors.TritonUnavailable("set-up failed")
        elif status in _STARTING:
            self.failure = errors.TritonUnavailable("the server is starting; try again")
        elif status == "DEFUNCT" or (status == "UNHEALTHY" and errors.from_text(reason) is None):
            lost = f"Cog's worker has died: {reason or status}"
            self.failure = errors.TritonUnavailable(lost)
            self._lost_at = min(self._lost_at, time.monotonic())
            if time.monotonic() - self._lost_at > _LOST_S:
                self._lost_at = math.inf
                self.on_loss(lost, False)
            return
        self._lost_at = math.inf
        if not self.started.done():
            if status in _READY:
                self.started.set_result(None)
            elif self.failure is not None and status == _FAILED:
                self.started.set_exception(self.failure)


def _properties(schema: bytes) -> frozenset[str]:
    try:
        return frozenset(json.loads(schema)["components"]["schemas"]["Input"]["properties"])
    except (ValueError, LookupError, TypeError):
        return frozenset()


class Upstream:
    """Cog and Triton on `ports` of 127.0.0.1, by the names of their settings.

    A prediction of the id `check_id` is the front's own; see `CogState`.
    """

    def __init__(
        self, ports: Mapping[str, int], check_id: str | None = None, start_timeout: float = 0.0
    ) -> None:
        self.ports = ports
        self.state = CogState(ports.get("PORT", 0), check_id, start_timeout)
        self.stopping = False
        """Whether no new request is taken any more."""
        self.ask_to_stop: Callable[[], None] = lambda: None
        """Begins the graceful stop."""
        self.cancel: Callable[[str], None] = lambda _: None
        """Cancels a prediction, of which nothing may be known yet."""
        self.health: Callable[[], dict[str, Any]] = dict
        """The server's state in the form of Cog's health."""
        self.without_cog: errors.CogTritonError | None = None
        """Why no Cog was started."""
        self.predictions: dict[str, Running] = {}
        """Predictions that clients wait for, by their ids."""


@dataclass(slots=True)
class Running:
    """A prediction that `clients` wait for, and whose it is."""

    tenant: Tenant | None
    clients: int = 0
