"""The gate before Cog's HTTP port: its endpoints, and coded answers where coglet has none."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, replace
from functools import partial

from cog_triton import errors
from cog_triton.door.event_stream import CodedEnd, code_first, worker_death
from cog_triton.door.gate import STOPPING, PrivateGate, cog_refusal, status_of
from cog_triton.door.json_body import member
from cog_triton.door.message import Answer, Forward, Refused, Request, json_answer
from cog_triton.door.prediction_bodies import (
    FEW_ITEMS,
    relayed,
    require_objects,
    require_safe_id,
    unknown_inputs,
)
from cog_triton.door.webhook_relay import WebhookRelay
from cog_triton.system.log_notes import log_once
from cog_triton.system.printable import printable

_log = logging.getLogger(__name__)

_HEALTH = "/health-check"
_READ = ("/", "/openapi.json")
_ID = r"[^/?#\s]{1,256}"
_MAY_NAME_PLACES = re.compile(rb'"webhook"|"id"|\\u')  # a name may be written in escapes
_PREDICT = re.compile(rf"POST /predictions|PUT /predictions/{_ID}")
_BLANKS = b" \t\r\n"
_MOST_TEXT = 1000
_CANCEL = re.compile(rf"POST /predictions/{_ID}/cancel")
_STOP = "POST /shutdown"


@dataclass(eq=False)
class CogGate(PrivateGate):
    """Decides on requests to Cog; answers have the shape of Cog's errors."""

    error_event = b"event: completed\n"
    ends_work = re.compile(rf"{_CANCEL.pattern}|{_STOP}")

    webhooks: WebhookRelay
    page_port: int | None = None
    """Public port with the page to try the model with, if there is one."""

    def refusal(self, status: int, error: errors.CogTritonError) -> Answer:
        """See `gate.Gate`."""
        return cog_refusal(status, error)

    async def _decide(self, request: Request) -> Forward | Answer:
        path, reads = request.path, request.method in ("GET", "HEAD")
        swapping = self.route.upstreams.swapping
        if reads and path == _HEALTH:
            if self.route.upstreams.stopping:  # 200 is for liveness probes, as of Cog
                reason = str(errors.TritonUnavailable(STOPPING))
                return json_answer(200, {"status": "UNHEALTHY", "user_healthcheck_error": reason})
            starting = swapping is not None and not swapping.ready
            if starting or not self.route.upstream.state.listens:
                return json_answer(503, {"status": "STARTING"})
            health = self.route.upstream.state.revise_health
            return replace(self._forward(request), revise=health)
        asked = f"{request.method} {path}"
        if asked == "HEAD /":  # liveness of Cog's parent
            return self._forward(request)
        if asked == _STOP:
            self.access.check_stop(request)
            self.route.upstreams.ask_to_stop()
            return json_answer(200, {})
        self.access.check(request)
        if reads and path == "/docs":  # Cog's own index names it
            return Answer(307, b"", headers=((b"location", b"/openapi.json"),))
        if asked == "GET /" and self.page_port:
            page = f"http://{request.host_name or 'localhost'}:{self.page_port}/"
            return replace(self._forward(request), revise=partial(_with_page, page))
        if _CANCEL.fullmatch(asked):
            for draining in self.route.others:
                if await draining.cancels(path.encode()):
                    return Answer(200, b"{}")
            return self._forward(request)
        if reads and path in _READ:
            return self._forward(request)
        if not _PREDICT.fullmatch(asked):
            raise errors.NotFound(f"{request.method[:20]} {path[:80]!r}: no such path or method")
        body = request.body
        request = _require_json(request)
        await self._require_bounded(body)
        if body.count(b",") > FEW_ITEMS:
            await self.large_bodies.run(len(body), require_objects, body)
        if body and not body.lstrip(_BLANKS).startswith(b"{"):  # coglet reads lists by position
            raise errors.InvalidArgument("body: must be a JSON object")
        if request.method == "PUT":
            require_safe_id(path.rpartition("/")[2])
        if _MAY_NAME_PLACES.search(body):
            to_us = self.webhooks.address()
            if found := await self.large_bodies.run(len(body), relayed, body, to_us):
                url, body = found
                await self.webhooks.expect(url)
                request = replace(request, body=body)
        state = self.route.upstream.state
        await state.require_serving()
        if known := await state.input_names():
            for name in await self.large_bodies.run(len(body), unknown_inputs, body, known):
                log_once(_log, f"input {printable(name)!r} of predictions is unknown, and ignored")
        if swapping is not None and b"respond-async" in request.header(b"prefer"):
            raise errors.InvalidArgument(
                "Prefer: respond-async: not with several models (--swap), which wait for"
                " connections to end"
            )
        to = await self.route.upstream_of()
        return replace(self._forward(request, to), revise=_revised, edit=CodedEnd())


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
    """Cog's index with the address of the page."""
    try:
        index = json.loads(body)
    except ValueError:
        return None
    return json_answer(status, {**index, "page_url": page}) if isinstance(index, dict) else None


def _revised(status: int, body: bytes) -> Answer | None:
    """The answer that begins with a code in the place of one of coglet's own."""
    if status in (400, 422):
        return _coded(status, body)
    if status == 409:
        return _refused(errors.Overloaded("all slots of Cog are taken (COG_MAX_CONCURRENCY)"))
    if status == 503:
        return _refused(errors.TritonUnavailable("Cog does not take predictions now; try again"))
    if status == 200 and b'"failed"' in body:
        if error := worker_death(str(member(body, "error"))):
            return _refused(error)
        if (changed := code_first(body)) is not None:
            return Answer(200, changed)
    return None


def _coded(status: int, body: bytes) -> Answer:
    """Coglet's refusal of a body, in text or as FastAPI words it, with its `detail` kept."""
    try:
        detail = json.loads(body)["detail"]
        text = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in detail)
    except (ValueError, LookupError, TypeError):
        detail, text = None, body.decode("utf-8", "replace")
    refusal = cog_refusal(status, errors.InvalidArgument(printable(text[:_MOST_TEXT])))
    return (
        refusal
        if detail is None
        else json_answer(status, {**json.loads(refusal.body), "detail": detail})
    )


def _refused(error: errors.CogTritonError) -> Answer:
    return cog_refusal(status_of(error), error)
