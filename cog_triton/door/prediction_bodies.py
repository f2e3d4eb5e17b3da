"""Bodies of predictions: what coglet would take elsewhere, or answer at length, is kept from it."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from cog_triton import errors
from cog_triton.door.json_body import member
from cog_triton.errors import InvalidArgument, nearest
from cog_triton.system.printable import printable
from cog_triton.text.sampling import SAMPLING

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


def relayed(body: bytes, address: str) -> tuple[object, bytes] | None:
    """The webhook of a prediction's JSON, and the JSON with one below `address` in its place.

    None if it names none. The end is always asked for; the address tells whether it is to be passed
    on. The JSON is written anew, so that coglet reads nothing that was not seen here.

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
            return None
        events = request.get(_FILTER)
        tells_end = not isinstance(events, list) or "completed" in events
        if isinstance(events, list) and not tells_end:
            request[_FILTER] = [*events, "completed"]
        request["webhook"] = f"{address}{int(tells_end)}/{quote(str(webhook), safe='')}"
        text = json.dumps(request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return webhook, text.encode()
    except ValueError as error:
        raise InvalidArgument(f"body: not JSON: {str(error)[:200]}") from error


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
            if hint := nearest(shown, sorted(known)):
                raise InvalidArgument(f"{shown}: unknown input{hint}")
            names.append(shown)
    return names
