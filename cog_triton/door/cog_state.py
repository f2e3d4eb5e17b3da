"""State of Cog, read from its /health-check, for what the front door answers in its place.

Also the names of the inputs that it takes, from its /openapi.json, which never change. Cog says
READY when its worker is set up; that a prediction passes through Cog itself is shown by one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any

from cog_triton import errors
from cog_triton.door.json_body import member
from cog_triton.door.message import Answer, json_answer
from cog_triton.door.upstream_connections import ask, read_json

_STARTING = ("STARTING", "UNKNOWN", None)
_HEALTH, _SCHEMA = b"/health-check", b"/openapi.json"
_STARTING_PERIOD_S = 0.05
_PERIOD_S = 0.5
_TIMEOUT_S = 10.0
_FRESH_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 60.0
_CHECKS = 4
_CHECK = json.dumps({"input": {"prompt": "a", "max_tokens": 1}}).encode()
_ACCEPTED = 202
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
        self._checks = 0
        self._slow_checks = 0
        self._withheld: dict[str, Any] | None = None if check_id is None else {"status": "STARTING"}
        self._inputs: frozenset[str] | None = None
        self._failure: errors.CogTritonError | None = None
        self.status: str | None = None
        """As Cog said last, such as STARTING or READY."""
        self.hangs = False
        """Whether it has not answered in time; in set-up, too, it answers at once."""
        self._take({})
        self.listens = False

    @property
    def is_set_up(self) -> bool:
        """Whether set-up has succeeded, whatever has happened since."""
        return self.status not in (*_STARTING, _FAILED)

    @property
    def failure(self) -> errors.CogTritonError | None:
        """Why predictions are not served; None if they are."""
        return self._failure

    async def require_serving(self) -> None:
        """Raise E2105 while predictions are not served, with the reason."""
        if self._failure is not None:  # a client may have been told READY since
            with suppress(OSError, ValueError, asyncio.TimeoutError):
                self._take(await asyncio.wait_for(self._read(), _FRESH_TIMEOUT_S))
        if self._failure is not None:
            raise self._failure

    def require_checked(self) -> None:
        """Raise E2105 or E2106 until a prediction has passed through Cog."""
        if self._withheld is not None and self._failure is not None:
            raise self._failure

    def revise_health(self, status: int, body: bytes) -> Answer | None:
        """The answer in place of Cog's READY while no prediction has passed through Cog."""
        if self._withheld is None or member(body, "status") not in _READY:
            return None
        return json_answer(status, self._withheld)

    async def input_names(self) -> frozenset[str]:
        """Names of the inputs of a prediction; none if Cog does not tell."""
        if self._inputs is None:
            with suppress(OSError, ValueError, asyncio.TimeoutError):
                schema = await asyncio.wait_for(self._read(_SCHEMA), _FRESH_TIMEOUT_S)
                self._inputs = _properties(schema)
        return self._inputs or frozenset()

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
            except ConnectionError:
                self.listens = False
            except TimeoutError:
                self.hangs = True
                rule = f"Cog has not answered for {_TIMEOUT_S:g} s; try again"
                self._failure = errors.TritonUnavailable(rule)
            except (OSError, ValueError):
                pass  # an answer that was cut short: the next one counts
            await asyncio.sleep(_STARTING_PERIOD_S if self._failure else _PERIOD_S)

    async def _read(self, path: bytes = _HEALTH) -> dict[str, Any]:
        def on_connected() -> None:
            self.listens = True

        return await read_json(self._port, path, on_connected)

    async def _check(self, prediction_id: str) -> None:
        """Send one small prediction, of an id that Cog does not know yet.

        What a restart of Triton explains is tried again; so is a slow answer, a few times.
        """
        path = f"/predictions/{prediction_id}"
        if self._checks:
            path += f".{self._checks}"
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
        self.hangs = False
        status = self.status = health.get("status")
        reason = str(health.get("user_healthcheck_error") or "")
        if status == _FAILED:
            logs = str(health.get("setup", {}).get("logs", ""))
            self._failure = errors.from_text(logs) or errors.TritonUnavailable("set-up failed")
        elif status in _STARTING:
            self._failure = errors.TritonUnavailable("the server is starting; try again")
        elif status == "DEFUNCT" or (status == "UNHEALTHY" and errors.from_text(reason) is None):
            self._failure = errors.TritonUnavailable(f"Cog's worker has died: {reason or status}")
        else:
            self._failure = None  # what our own health check says is said of each prediction, too


def _properties(schema: dict[str, Any]) -> frozenset[str]:
    """Names of the properties of the schema's Input."""
    try:
        return frozenset(schema["components"]["schemas"]["Input"]["properties"])
    except (LookupError, TypeError):
        return frozenset()
