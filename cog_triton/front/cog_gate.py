"""The gate before Cog's HTTP port: its endpoints, and coded answers where coglet has none.

Errors begin with a code, at the end of event streams too, whatever coglet says first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import unquote

from starlette.types import ASGIApp

from cog_triton import errors
from cog_triton.front.coded_events import WORDS, CodedEnd, worker_death
from cog_triton.front.cog_state import Running
from cog_triton.front.gate import STOPPING, PrivateGate, cog_refusal, status_of
from cog_triton.front.json_body import member
from cog_triton.front.message import Answer, Forward, Refused, Request, json_answer
from cog_triton.front.prediction_body import prepared, require_safe_id
from cog_triton.front.webhook_relay import WebhookRelay
from cog_triton.system.log_format import log_refusal
from cog_triton.system.log_notes import log_once
from cog_triton.system.printable import printable

_log = logging.getLogger(__name__)

_HEALTH = "/health-check"
_SCHEMA = "/openapi.json"
_READ = ("/", _SCHEMA)
_ID = r"[^/?#\s]{1,256}"
_PREDICT = re.compile(rf"POST /predictions|PUT /predictions/{_ID}")
_NOT_JSON = re.compile(r"^Failed to parse the request body as JSON: (?:[^\s:]{1,80}: )?")
_ERROR_FIRST = re.compile(rb'\A(\{"error":")%b' % WORDS)
_MOST_TEXT = 1000
_CANCEL = re.compile(rf"POST /predictions/(?P<id>{_ID})/cancel")
_STOP = "POST /shutdown"
_ORDERED_S = 10.0


@dataclass(eq=False)
class CogGate(PrivateGate):
    """Decides on requests to Cog; answers have the shape of Cog's errors."""

    refusal = staticmethod(cog_refusal)
    error_event = b"event: completed\n"
    ends_work = re.compile(rf"{_CANCEL.pattern}|{_STOP}")

    webhooks: WebhookRelay
    page_port: int | None = None
    """Public port with the page to try the model with, if there is one."""
    scheme: str = "http"

    async def _decide(self, request: Request) -> Forward | ASGIApp:
        path, reads = request.path, request.method in ("GET", "HEAD")
        upstream = self.upstream
        if reads and path == _HEALTH:
            return self._health(request)
        if upstream.without_cog is not None:
            return cog_refusal(503, upstream.without_cog)
        asked = f"{request.method} {path}"
        if asked == "HEAD /":  # liveness of Cog's parent
            return self._forward(request)
        if asked == _STOP:
            self.access.check_stop(request)
            upstream.ask_to_stop()
            return json_answer(200, {})
        request = self.access.check(request, "predictions")
        if reads and path == "/docs":  # Cog's own index names it
            return Answer(307, b"", headers=((b"location", b"/openapi.json"),))
        if asked == "GET /" and self.page_port:
            page = f"{self.scheme}://{request.host_name or 'localhost'}:{self.page_port}/"
            return replace(self._forward(request), revise=partial(_with_page, page))
        if cancelled := _CANCEL.fullmatch(asked):
            cancelled_id = unquote(cancelled["id"])
            cancel = partial(upstream.cancel, cancelled_id)
            running = upstream.predictions.get(cancelled_id)
            if on_its_way := running is not None and running.clients > 0:
                cancel()  # Cog may not know it yet
            revise = partial(_cancelled, cancel, on_its_way)
            return replace(self._forward(request), revise=revise)
        if reads and path == _SCHEMA:
            if upstream.state.schema is not None:
                return Answer(200, upstream.state.schema)
            if not upstream.state.listens:
                raise errors.TritonUnavailable("the server is starting; try again")
        if reads and path in _READ:
            return self._forward(request)
        if not _PREDICT.fullmatch(asked):
            raise errors.NotFound(f"{request.method[:20]} {path[:80]!r}: no such path or method")
        request = _require_json(await self._inflated(request))
        await self._require_bounded(request.body)
        name = path.rpartition("/")[2] if request.method == "PUT" else None
        if name is not None:
            require_safe_id(name)
        await upstream.state.require_serving()
        known, address = await upstream.state.input_names(), self.webhooks.address()
        size = len(request.body)
        found = await self.large_bodies.run(size, prepared, request.body, known, address)
        if found.webhook is not None:
            await self.webhooks.expect(found.webhook)
        for each in found.unknown:
            log_once(_log, f"input {each!r} of predictions is unknown, and ignored")
        name = name or found.id
        if name is None:  # so that the server can cancel it early
            name = f"pred_{secrets.token_hex(8)}"
            target = request.target.replace(b"/predictions", b"/predictions/" + name.encode(), 1)
            request = replace(request, method="PUT", target=target)
        running = upstream.predictions.get(name)
        if running is None or not running.clients:  # one of another tenant may have had the id
            running = upstream.predictions[name] = Running(request.tenant)
        running.clients += 1
        streams = bool(upstream.health())  # the builder has no such state, and does not
        ended, coded = partial(self._ended, name), partial(_revised, name, streams)
        forward = self._forward(request)
        return replace(forward, body=found.body, revise=coded, edit=CodedEnd(), ended=ended)

    def _health(self, request: Request) -> Forward | Answer:
        """Cog's state; the server's own while it is known better there. 200 is as of Cog."""
        upstream, own = self.upstream, self.upstream.health()
        if (error := upstream.without_cog) is not None:
            state = {"status": "UNHEALTHY", "user_healthcheck_error": str(error)}
            return json_answer(503, {**state, "without_cog": own})
        if upstream.stopping:
            reason = str(errors.TritonUnavailable(STOPPING))
            return json_answer(200, {"status": "UNHEALTHY", "user_healthcheck_error": reason})
        if own.get("status") == "UNHEALTHY":
            return json_answer(200, {**upstream.state.health, **own})
        if not upstream.state.listens:
            return json_answer(503, {"status": "STARTING"})
        return replace(self._forward(request), revise=upstream.state.revise_health)

    def _ended(self, name: str, whole: bool) -> None:
        """Cancel a prediction that its last client has left."""
        upstream = self.upstream
        running = upstream.predictions[name]
        running.clients -= 1
        if running.clients:
            return
        if not whole:
            upstream.cancel(name)
        if running.tenant is None:
            del upstream.predictions[name]
        else:  # an asynchronous one is ordered after its answer
            asyncio.get_running_loop().call_later(_ORDERED_S, self._forget, name)

    def _forget(self, name: str) -> None:
        predictions = self.upstream.predictions
        if name in predictions and not predictions[name].clients:
            del predictions[name]


def _require_json(request: Request) -> Request:
    """The request, of the type JSON if it names none: coglet would take an empty input then."""
    if not request.body:
        return request
    kind = request.header(b"content-type").partition(b";")[0].strip().lower()
    if not kind:
        others = [pair for pair in request.headers if pair[0] != b"content-type"]
        return replace(request, headers=[*others, (b"content-type", b"application/json")])
    if kind != b"application/json" and not kind.endswith(b"+json"):
        rule = "must be application/json, as of curl -H 'Content-Type: application/json'"
        shown = kind[:80].decode("latin-1")
        raise Refused(415, errors.InvalidArgument(f"Content-Type: {shown!r}: {rule}"))
    return request


def _with_page(page: str, status: int, body: bytes) -> Answer | None:
    try:
        index = json.loads(body)
    except ValueError:
        return None
    return json_answer(status, {**index, "page_url": page}) if isinstance(index, dict) else None


def _cancelled(
    cancel: Callable[[], None], on_its_way: bool, status: int, body: bytes
) -> Answer | None:
    """Have the server cancel what Cog knows; 200 for what it has cancelled before Cog knew it."""
    if status == 200 and not on_its_way:
        cancel()
    return json_answer(200, {}) if status == 404 and on_its_way else None


def _revised(name: str, streams: bool, status: int, body: bytes) -> Answer | None:
    """The answer that begins with a code in the place of one of coglet's own.

    What it has not begun is logged, with `name`, the prediction's own id. If the predictor
    `streams`, coglet says the contrary (406) only until its worker is set up.
    """
    if status in (400, 422):
        return _coded(name, status, body)
    if status == 409:
        full = errors.Overloaded("all slots of Cog are taken (COG_MAX_CONCURRENCY)")
        return _refused(full, name)
    starts = status == 406 and streams
    if starts or (status == 503 and errors.from_text(body.decode("utf-8", "replace")) is None):
        down = errors.TritonUnavailable("Cog does not take predictions now; try again")
        return _refused(down, name)
    if status == 200 and b'"failed"' in body:
        if error := worker_death(str(member(body, "error"))):
            return cog_refusal(status_of(error), error)
        changed, count = _ERROR_FIRST.subn(rb"\1", body, count=1)
        if count:
            return Answer(200, changed)
    return None


def _coded(name: str, status: int, body: bytes) -> Answer:
    """Coglet's refusal of a body, in text or as FastAPI words it, with its `detail` kept."""
    try:
        detail = json.loads(body)["detail"]
        text = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in detail)
    except (ValueError, LookupError, TypeError):
        detail, text = None, _NOT_JSON.sub("body: not JSON: ", body.decode("utf-8", "replace"))
    error = errors.InvalidArgument(printable(text[:_MOST_TEXT]))
    log_refusal("predictions", error, id=name)
    refusal = cog_refusal(status, error)
    if detail is None:
        return refusal
    return json_answer(status, {**json.loads(refusal.body), "detail": detail})


def _refused(error: errors.CogTritonError, name: str) -> Answer:
    log_refusal("predictions", error, id=name)
    return cog_refusal(status_of(error), error)
