"""Names of a prediction's inputs: coglet drops those it does not know, whatever they meant.

The rule is that of the other ports: a near miss, and what would change the text, is refused by
name; other unknown inputs are noted in the log.
"""

from __future__ import annotations

import json
from typing import Any

from cog_triton.errors import InvalidArgument, nearest
from cog_triton.text.sampling import SAMPLING

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


def unknown_inputs(body: bytes, known: frozenset[str]) -> list[str]:
    """Names of a prediction's inputs that are not `known`, and may be ignored; raises E1005.

    What is no JSON, or has no inputs, is left to coglet.
    """
    try:
        inputs = json.loads(body)["input"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
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
