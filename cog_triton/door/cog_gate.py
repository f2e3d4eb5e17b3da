"""The gate before Cog's HTTP port: its endpoints, and coded answers where coglet has none.

Errors begin with a code, at the end of event streams too, whatever coglet says first. What of a
prediction's body it would take elsewhere, or answer at length, is kept from it.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

from cog_triton import errors
from cog_triton.door.gate import STOPPING, PrivateGate, cog_refusal, status_of
from cog_triton.door.json_body import member
from cog_triton.door.message import Answer, Forward, Refused, Request, json_answer
from cog_triton.door.relay import EVENT_END
from cog_triton.door.webhook_relay import WebhookRelay
from cog_triton.errors import InvalidArgument, TritonUnavailable
from cog_triton.serving.tenants import HEADER
from cog_triton.system.log_format import log_refusal
from cog_triton.system.log_notes import log_once
from cog_triton.system.printable import printable
from cog_triton.text.sampling import SAMPLING

# What coglet says of predictions whose worker has died; keys are sorted, so it comes first.
_WORKER_DIED = ("Worker crashed", "Failed to send request")
_COMPLETED = b'\r\nevent: completed\ndata: {"error":"'
_UNCODED = re.compile(
    rb'([0-9A-Fa-f]{1,8})(\r\nevent: completed\ndata: \{"error":)"((?:%s)[^"\\]{0,150})"'
    % "|".join(_WORKER_DIED).encode()
)
# What coglet puts before the text of a prediction's exception: its own words, and the class.
_WORDS = (
    rb"Prediction failed: (?:[A-Z][a-z]{1,20}(?: [a-z]{1,20}){1,3}: )?"
    rb"(?:\w{1,64}: )?(?=E[12]\d{3} )"
)
_LATE_CODE = re.compile(
    rb'([0-9A-Fa-f]{1,8})(\r\nevent: completed\ndata: \{"error":")(%b)' % _WORDS
)
_ERROR_FIRST = re.compile(rb'\A(\{"error":")%b' % _WORDS)
_WHOLE = (EVENT_END, b"0\r\n\r\n")
_MOST_HELD = 256


def worker_death(reason: str) -> TritonUnavailable | None:
    """E2105 for one of coglet's own failures, None for any other."""
    if not reason.startswith(_WORKER_DIED):
        return None
    return TritonUnavailable(f"Cog's worker has died: {reason}; try again")


class CodedEnd:
    """Gives coglet's last event its code at its beginning; a chunk an event, as coglet writes them.

    Only the start of an event is ever held back, for as long as the rest of it has not come.
    """

    def __init__(self) -> None:
        self._held = b""

    def __call__(self, data: bytes) -> bytes:
        """What of the stream can be passed on, now that `data` has come."""
        if self._held:
            data, self._held = self._held + data, b""
        if _COMPLETED in data:
            data = _UNCODED.sub(_coded_event, data, count=1)
            data = _LATE_CODE.sub(_without_words, data, count=1)
        if data.endswith(_WHOLE):
            return data
        start = data.rfind(EVENT_END)
        start = start + len(EVENT_END) if start >= 0 else 0
        if len(data) - start < _MOST_HELD:
            data, self._held = data[:start], data[start:]
        return data


def _coded_event(found: re.Match[bytes]) -> bytes:
    size, between, reason = found.groups()
    error = json.dumps(str(worker_death(reason.decode("utf-8", "replace")))).encode()
    return b"%x%b%b" % (int(size, 16) - len(reason) - 2 + len(error), between, error)


def _without_words(found: re.Match[bytes]) -> bytes:
    size, between, words = found.groups()
    return b"%x%b" % (int(size, 16) - len(words), between)


FEW_ITEMS = 256
_SAFE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:~@=+,-]{0,199}")
_FILTER = "webhook_events_filter"
_CHATS = "/v1/chat/completions has it"
_CHANGE_THE_TEXT = {
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), _CHATS),
    **dict.fromkeys(("images", "image", "image_url", "image_urls"), _CHATS),
    **dict.fromkeys(("response_format", "structured_outputs", "json_schema"), _CHATS),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _CHATS),
    **{item.name: _CHATS for item in SAMPLING if item.body is not None and item.inputs is None},
    **dict.fromkeys(("stop_token_ids", "chat_template_kwargs"), _CHATS),
    **dict.fromkeys(("reasoning_effort", "ignore_eos", "n", "best_of"), _CHATS),
    **dict.fromkeys(("stop", "stop_words", "stop_strings"), "use stop_sequences"),
    **dict.fromkeys(("random_seed",), "use seed"),
    **dict.fromkeys(("audio", "video", "videos"), "this server reads text"),
    "chat_template": "use prompt_template, or CHAT_TEMPLATE of the server",
}
_SHOWN = 80
_MOST_NOTED = 20
_NEUTRAL: tuple[Any, ...] = (None, [], {}, "", False)


def require_objects(body: bytes) -> None:
    """Refuse messages that are no objects; coglet takes 2.6 KB and 15 us to say it of each."""
    try:
        messages = json.loads(body)["input"]["messages"]
    except ValueError as error:  # such as of a number that coglet could read, and Python not
        raise errors.InvalidArgument(f"body: not JSON: {str(error)[:200]}") from error
    except (LookupError, TypeError):
        return
    if isinstance(messages, list):
        wrong = [place for place, item in enumerate(messages) if not isinstance(item, dict)]
        if len(wrong) > FEW_ITEMS:
            rule = f"messages[{wrong[0]}]: must be an object with role and content"
            raise errors.BadMessages(f"{rule}, as {len(wrong) - 1} more")


def require_safe_id(name: str) -> None:
    """Refuse an id that coglet, which makes directories of its name, would take elsewhere."""
    if not _SAFE_ID.fullmatch(name):
        rule = "at most 200 of A-Z a-z 0-9 _ . : ~ @ = + , -, first a letter, digit or _"
        raise InvalidArgument(f"id={printable(name[:80])!r}: must be {rule}")


def relayed(body: bytes, address: str) -> tuple[object, object, bytes]:
    """The id and the webhook of a prediction's JSON, and the JSON with one below `address` instead.

    Each is None if it has none. The end is always asked for; the address says whether it is to be
    passed on. Then the JSON is written again, so that coglet reads nothing that was not seen here.

    Raises:
        InvalidArgument: an unsafe id; not a JSON object; what no JSON can hold, such as 1e999.
    """
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            raise InvalidArgument("body: must be a JSON object")
        if isinstance(request.get("id"), str):
            require_safe_id(request["id"])
        if (webhook := request.get("webhook")) is None:
            return request.get("id"), None, body
        events = request.get(_FILTER)
        tells_end = not isinstance(events, list) or "completed" in events
        if isinstance(events, list) and not tells_end:
            request[_FILTER] = [*events, "completed"]
        request["webhook"] = f"{address}{int(tells_end)}/{quote(str(webhook), safe='')}"
        text = json.dumps(request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return request.get("id"), webhook, text.encode()
    except ValueError as error:
        raise InvalidArgument(f"body: not JSON: {str(error)[:200]}") from error


def with_tenant(body: bytes, tenant: str) -> bytes:
    """The JSON of a prediction with its tenant in `context`, whatever it has said itself there.

    Raises:
        InvalidArgument: not a JSON object; what no JSON can hold, such as 1e999.
    """
    try:
        request = json.loads(body or b"{}")
        context = request.get("context")
        others = context if isinstance(context, dict) else {}
        request["context"] = {**others, HEADER: tenant}
        text = json.dumps(request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (ValueError, AttributeError) as error:
        raise InvalidArgument(f"body: not a JSON object: {str(error)[:200]}") from error


def unknown_inputs(body: bytes, known: frozenset[str]) -> list[str]:
    """Names of a prediction's inputs that are not `known`, and may be ignored; raises E1005.

    What is no JSON, or has no inputs, is left to coglet.
    """
    inputs = member(body, "input")
    if not isinstance(inputs, dict) or inputs.keys() <= known:
        return []
    names: list[str] = []
    for name, value in inputs.items():
        if name in known:
            continue
        shown = name[:_SHOWN]
        if name in _CHANGE_THE_TEXT and "prompt" in known:
            if any(type(value) is type(item) and value == item for item in _NEUTRAL):
                continue
            raise InvalidArgument(f"{shown}: not an input of predictions; {_CHANGE_THE_TEXT[name]}")
        if len(names) < _MOST_NOTED:
            names.append(shown)
    return names


def without_nulls(body: bytes) -> bytes:
    """The JSON of a prediction without inputs that are null, of which coglet takes few."""
    try:
        request = json.loads(body)
        given = request["input"].items()
        request["input"] = {name: value for name, value in given if value is not None}
        text = json.dumps(request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (ValueError, LookupError, TypeError, AttributeError):
        return body  # coglet says what is wrong with it


_log = logging.getLogger(__name__)

_HEALTH = "/health-check"
_READ = ("/", "/openapi.json")
_ID = r"[^/?#\s]{1,256}"
_MAY_NAME_PLACES = re.compile(rb'"webhook"|"id"|\\u')  # a name may be written in escapes
_PREDICT = re.compile(rf"POST /predictions|PUT /predictions/{_ID}")
_NOT_JSON = re.compile(r"^Failed to parse the request body as JSON: (?:[^\s:]{1,80}: )?")
_BLANKS = b" \t\r\n"
_MOST_TEXT = 1000
_CANCEL = re.compile(rf"POST /predictions/(?P<id>{_ID})/cancel")
_STOP = "POST /shutdown"


@dataclass(eq=False)
class CogGate(PrivateGate):
    """Decides on requests to Cog; answers have the shape of Cog's errors."""

    error_event = b"event: completed\n"
    ends_work = re.compile(rf"{_CANCEL.pattern}|{_STOP}")

    webhooks: WebhookRelay
    page_port: int | None = None
    """Public port with the page to try the model with, if there is one."""
    scheme: str = "http"

    def __post_init__(self) -> None:
        self._in_flight: Counter[str] = Counter()

    def refusal(self, status: int, error: errors.CogTritonError, path: str = "") -> Answer:
        """See `gate.Gate`."""
        return cog_refusal(status, error)

    async def _decide(self, request: Request) -> Forward | Answer:
        path, reads = request.path, request.method in ("GET", "HEAD")
        if reads and path == _HEALTH:
            if self.route.upstream.stopping:  # 200 is for liveness probes, as of Cog
                reason = str(errors.TritonUnavailable(STOPPING))
                return json_answer(200, {"status": "UNHEALTHY", "user_healthcheck_error": reason})
            if not self.route.upstream.state.listens:
                return json_answer(503, {"status": "STARTING"})
            health = self.route.upstream.state.revise_health
            return replace(self._forward(request), revise=health)
        asked = f"{request.method} {path}"
        if asked == "HEAD /":  # liveness of Cog's parent
            return self._forward(request)
        if asked == _STOP:
            self.access.check_stop(request)
            self.route.upstream.ask_to_stop()
            return json_answer(200, {})
        request = self.access.check(request, "predictions")
        if reads and path == "/docs":  # Cog's own index names it
            return Answer(307, b"", headers=((b"location", b"/openapi.json"),))
        if asked == "GET /" and self.page_port:
            page = f"{self.scheme}://{request.host_name or 'localhost'}:{self.page_port}/"
            return replace(self._forward(request), revise=partial(_with_page, page))
        if cancelled := _CANCEL.fullmatch(asked):
            cancelled_id = unquote(cancelled["id"])
            cancel = partial(self.route.upstream.cancel, cancelled_id)
            if on_its_way := cancelled_id in self._in_flight:  # and Cog may not know it yet
                cancel()
            revise = partial(_cancelled, cancel, on_its_way)
            return replace(self._forward(request), revise=revise)
        if reads and path in _READ:
            return self._forward(request)
        if not _PREDICT.fullmatch(asked):
            raise errors.NotFound(f"{request.method[:20]} {path[:80]!r}: no such path or method")
        request = await self._inflated(request)
        if request.tenant is not None and not request.body:
            request = replace(request, body=b"{}")
        body = request.body
        request = _require_json(request)
        await self._require_bounded(body)
        if body.count(b",") > FEW_ITEMS:
            await self.large_bodies.run(len(body), require_objects, body)
        if body and not body.lstrip(_BLANKS).startswith(b"{"):  # coglet reads lists by position
            raise errors.InvalidArgument("body: must be a JSON object")
        name: object = path.rpartition("/")[2] if request.method == "PUT" else None
        if isinstance(name, str):
            require_safe_id(name)
        if _MAY_NAME_PLACES.search(body):
            found = self.large_bodies.run(len(body), relayed, body, self.webhooks.address())
            own, url, body = await found
            name = name or own
            if url is not None:
                await self.webhooks.expect(url)
                request = replace(request, body=body)
        if request.tenant is not None:
            told = request.tenant.encoded
            body = await self.large_bodies.run(len(body), with_tenant, body, told)
            request = replace(request, body=body)
        if b"null" in body:
            body = await self.large_bodies.run(len(body), without_nulls, body)
            request = replace(request, body=body)
        state = self.route.upstream.state
        await state.require_serving()
        if known := await state.input_names():
            for each in await self.large_bodies.run(len(body), unknown_inputs, body, known):
                log_once(_log, f"input {printable(each)!r} of predictions is unknown, and ignored")
        if name is None:  # so that the server can cancel it early
            name = f"pred_{secrets.token_hex(8)}"
            target = request.target.replace(b"/predictions", b"/predictions/" + name.encode(), 1)
            request = replace(request, method="PUT", target=target)
        self._in_flight[str(name)] += 1
        ended, coded = partial(self._ended, str(name)), partial(_revised, str(name))
        return replace(self._forward(request), revise=coded, edit=CodedEnd(), ended=ended)

    def _ended(self, name: str, whole: bool) -> None:
        """Have the server cancel a prediction that its last client has left."""
        self._in_flight[name] -= 1
        if not self._in_flight[name]:
            del self._in_flight[name]
            if not whole:
                self.route.upstream.cancel(name)


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


def _cancelled(
    cancel: Callable[[], None], on_its_way: bool, status: int, body: bytes
) -> Answer | None:
    """Have the server cancel what Cog knows; 200 for what it has cancelled before Cog knew it."""
    if status == 200 and not on_its_way:
        cancel()
    return json_answer(200, {}) if status == 404 and on_its_way else None


def _revised(name: str, status: int, body: bytes) -> Answer | None:
    """The answer that begins with a code in the place of one of coglet's own.

    What it has not begun is logged, with `name`, the prediction's own id.
    """
    if status in (400, 422):
        return _coded(name, status, body)
    if status == 409:
        full = errors.Overloaded("all slots of Cog are taken (COG_MAX_CONCURRENCY)")
        return _refused(full, name)
    if status == 503 and errors.from_text(body.decode("utf-8", "replace")) is None:
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
