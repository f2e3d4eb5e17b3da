"""Tool calls in the messages of a chat, in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cog_triton.errors import BadMessages, InvalidArgument
from cog_triton.text import client_json

ToolCall = dict[str, Any]
_MOST_OF_AN_ID = 256


def parse_tool_calls(where: str, value: Any) -> list[ToolCall]:
    """Calls of an assistant's message, their arguments as a dict, as Hugging Face's templates have
    them; raises BadMessages (E1006) naming what is wrong."""
    if not isinstance(value, list):
        raise BadMessages(f"{where}: must be a list of tool calls")
    return [_call(f"{where}[{place}]", item) for place, item in enumerate(value)]


def parse_tool_call_id(where: str, value: Any) -> str:
    """The id of the call that a message of role `tool` answers."""
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_OF_AN_ID:
        raise BadMessages(f"{where}: must be the id of a tool call, as text")
    return require_unicode(where, value)


def require_unicode(where: str, text: str) -> str:
    """`text`, refused if it has a lone surrogate: JSON can spell one, tokenizers take none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadMessages(f"{where}: not Unicode text: {error.reason}") from None
    return text


def check_value_count(messages: list[Any]) -> None:
    """Raise E1005 if the arguments of all calls together may have too many values."""
    count = sum(_count_values(message) for message in messages if isinstance(message, dict))
    if count > client_json.MAX_VALUES:
        raise InvalidArgument(
            f"messages: arguments of tool calls have some {count} values; {client_json.MAX_VALUES}"
            " at most"
        )


def _count_values(message: Mapping[str, Any]) -> int:
    found = 0
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        text = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(text, str):
            found += client_json.count_values(text)
    return found


def _call(where: str, value: Any) -> ToolCall:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise BadMessages(f"{where}: must be an object with id, type 'function' and function")
    function = value.get("function")
    if not isinstance(function, dict):
        raise BadMessages(f"{where}.function: must be an object with name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadMessages(f"{where}.function.name: must be text")
    call: ToolCall = {
        "type": "function",
        "function": {
            "name": require_unicode(f"{where}.function.name", name),
            "arguments": _arguments(f"{where}.function.arguments", function.get("arguments")),
        },
    }
    if value.get("id") is not None:
        call["id"] = parse_tool_call_id(f"{where}.id", value["id"])
    return call


def _arguments(where: str, text: Any) -> dict[str, Any]:
    if text is None or text == "":
        return {}
    if not isinstance(text, str):
        raise BadMessages(f"{where}: must be JSON as text, as it was sent")
    try:
        arguments = client_json.parse(text)
    except ValueError as error:
        raise BadMessages(f"{where}: not JSON: {str(error)[:100]}") from None
    if not isinstance(arguments, dict):
        raise BadMessages(f"{where}: must be a JSON object")
    # A lone surrogate can be spelled by an escape, too.
    require_unicode(where, json.dumps(arguments, ensure_ascii=False) if "\\u" in text else text)
    return arguments
