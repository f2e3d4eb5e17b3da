"""The JSON of a prediction's body: read once, checked, and written again if Cog may not have it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from cog_triton.errors import BadMessages, InvalidArgument
from cog_triton.system.printable import printable
from cog_triton.text.sampling import SAMPLING

_FEW_ITEMS = 256
_BLANKS = b" \t\r\n"
_SAFE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:~@=+,-]{0,199}")
_MAY_NAME_PLACES = re.compile(rb'"webhook"|"id"|\\u')  # a name may be written in escapes
_FILTER = "webhook_events_filter"
_CHATS = (
    *("tools", "tool_choice", "functions", "function_call", "images", "image", "image_url"),
    *("image_urls", "response_format", "structured_outputs", "json_schema", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "stop_token_ids", "chat_template_kwargs"),
    *("reasoning_effort", "ignore_eos", "n", "best_of"),
    *(item.name for item in SAMPLING if item.body is not None and item.inputs is None),
)
_CHANGE_THE_TEXT = {
    **dict.fromkeys(_CHATS, "/v1/chat/completions has it"),
    **dict.fromkeys(("stop", "stop_words", "stop_strings"), "use stop_sequences"),
    **dict.fromkeys(("audio", "video", "videos"), "this server reads text"),
    "random_seed": "use seed",
    "chat_template": "use prompt_template, or CHAT_TEMPLATE of the server",
}
_SHOWN = 80
_MOST_NOTED = 20
_written = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """A body for Cog, its id and webhook, if any, and the names of unknown inputs."""

    body: bytes
    id: str | None = None
    webhook: str | None = None
    unknown: list[str] = field(default_factory=list)


def prepared(body: bytes, known: frozenset[str], webhook_address: str) -> PreparedBody:
    """What becomes of a bounded body; without `known` inputs, no name is unknown.

    The body is written again without inputs that are null, of which coglet takes few, and with an
    address below `webhook_address` for its webhook. Any other body is passed on as it came: of two
    members of one name coglet refuses the body, or reads the last of an input, as Python does.
    What Python cannot read is left to coglet if it can have neither an id nor a webhook.

    Raises:
        InvalidArgument: not a JSON object; an unsafe id; an input that would change the text; what
            no JSON can hold, such as 1e999, in what is to be written again.
        BadMessages: many messages are no objects.
    """
    if not body:
        return PreparedBody(body)
    if not body.lstrip(_BLANKS).startswith(b"{"):  # coglet reads lists by position
        raise InvalidArgument("body: must be a JSON object")
    try:
        request = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        if _MAY_NAME_PLACES.search(body) or body.count(b",") > _FEW_ITEMS:
            raise _not_json(error) from error
        return PreparedBody(body)
    name, webhook, inputs = request.get("id"), request.get("webhook"), request.get("input")
    if isinstance(name, str):
        require_safe_id(name)
    unknown: list[str] = []
    has_nulls = False
    if isinstance(inputs, dict):
        if has_nulls := None in inputs.values():
            inputs = {key: value for key, value in inputs.items() if value is not None}
            request["input"] = inputs
        _require_objects(inputs.get("messages"))
        if known and not inputs.keys() <= known:
            unknown = _unknown(inputs, known)
    if has_nulls or webhook is not None:
        try:
            if webhook is not None:
                _relay_webhook(request, webhook_address)
            body = _written(request).encode()
        except (ValueError, RecursionError) as error:
            raise _not_json(error) from error
    if not isinstance(webhook, str | None):
        raise InvalidArgument("webhook: must be an http(s):// URL")
    return PreparedBody(body, name if isinstance(name, str) else None, webhook, unknown)


def require_safe_id(name: str) -> None:
    """Refuse an id that coglet, which makes directories of its name, would take elsewhere."""
    if not _SAFE_ID.fullmatch(name):
        rule = "at most 200 of A-Z a-z 0-9 _ . : ~ @ = + , -, first a letter, digit or _"
        raise InvalidArgument(f"id={printable(name[:80])!r}: must be {rule}")


def _not_json(error: Exception) -> InvalidArgument:
    return InvalidArgument(f"body: not JSON: {str(error)[:200]}")


def _require_objects(messages: object) -> None:
    """Refuse messages that are no objects; coglet takes 2.6 KB and 15 us to say it of each."""
    if isinstance(messages, list) and len(messages) > _FEW_ITEMS:
        wrong = [place for place, item in enumerate(messages) if not isinstance(item, dict)]
        if len(wrong) > _FEW_ITEMS:
            rule = f"messages[{wrong[0]}]: must be an object with role and content"
            raise BadMessages(f"{rule}, as {len(wrong) - 1} more")


def _relay_webhook(request: dict[str, Any], address: str) -> None:
    """Have coglet post below `address`, the end always: the address says whether to pass it on."""
    events = request.get(_FILTER)
    tells_end = not isinstance(events, list) or "completed" in events
    if isinstance(events, list) and not tells_end:
        request[_FILTER] = [*events, "completed"]
    url = quote(str(request["webhook"]), safe="")
    request["webhook"] = f"{address}{int(tells_end)}/{url}"


def _unknown(inputs: dict[str, Any], known: frozenset[str]) -> list[str]:
    """Names of inputs that may be ignored; raises E1005 for one that would change the text."""
    names: list[str] = []
    for name, value in inputs.items():
        if name in known:
            continue
        shown = printable(name[:_SHOWN])
        if name in _CHANGE_THE_TEXT and "prompt" in known:
            if value is False or value in ([], {}, ""):
                continue
            raise InvalidArgument(f"{shown}: not an input of predictions; {_CHANGE_THE_TEXT[name]}")
        if len(names) < _MOST_NOTED:
            names.append(shown)
    return names
