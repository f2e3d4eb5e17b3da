"""Structural tag of guided decoding: free text until a call's opening, then its arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from cog_triton.errors import InvalidArgument
from cog_triton.text import client_json
from cog_triton.text.json_schema import OBJECT, SchemaCost, parse_schema
from cog_triton.text.tool_schema import ToolFunction

_MAX_LENGTH = 128 << 10
_MAX_TAGS = 128
_MAX_MARK = 512


class CallForm(NamedTuple):
    """How a model writes a call: `trigger` tells it from text, and `opening` begins with that.

    The function's name, as JSON, is between `opening` and `middle`, the arguments before `closing`.
    """

    trigger: str
    opening: str
    middle: str
    closing: str


def calls_tag(functions: Sequence[ToolFunction], form: CallForm) -> str:
    """Guide of an answer that may call `functions`; raises E1005.

    The arguments of strict ones follow their schemas, those of others are any JSON object.
    """
    tags = [
        {
            "type": "tag",
            "begin": f"{form.opening}{json.dumps(function.name)}{form.middle}",
            "content": {"type": "json_schema", "json_schema": _arguments(function)},
            "end": form.closing,
        }
        for function in functions
    ]
    value = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags}
    text = json.dumps({"type": "structural_tag", "format": value})
    check_structural_tag(text, "tools")
    return text


def check_structural_tag(text: str, where: str) -> None:
    """Raise E1005, after `where`, for what is not such a guide: others may not compile."""
    if len(text) > _MAX_LENGTH:
        raise InvalidArgument(f"{where}: has {len(text)} characters; {_MAX_LENGTH} at most")
    try:
        found = client_json.parse(text)
        form = found["format"]
        triggers, tags = form["triggers"], form["tags"]
        rest = [found.keys() ^ {"type", "format"}, form.keys() ^ {"type", "triggers", "tags"}]
        (trigger,) = triggers
        known = [found["type"], form["type"]] == ["structural_tag", "triggered_tags"]
        if not known or any(rest) or not trigger or not 0 < len(tags) <= _MAX_TAGS:
            raise InvalidArgument(f"{where}: must be a structural tag of one trigger")
        cost = SchemaCost()
        for place, tag in enumerate(tags):
            _check_tag(tag, trigger, f"{where}.format.tags[{place}]", cost)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__}: {str(error)[:80]}"
        raise InvalidArgument(f"{where}: not a structural tag: {detail}") from None


def _check_tag(tag: Any, trigger: str, where: str, cost: SchemaCost) -> None:
    begin, end, content = tag["begin"], tag["end"], tag["content"]
    rest = [tag.keys() ^ {"type", "begin", "content", "end"}]
    rest.append(content.keys() ^ {"type", "json_schema"})
    if [tag["type"], content["type"]] != ["tag", "json_schema"] or any(rest):
        raise InvalidArgument(f"{where}: must be a tag whose content is a json_schema")
    marked = begin.startswith(trigger) and isinstance(end, str) and end
    if not marked or max(len(begin), len(end)) > _MAX_MARK:
        raise InvalidArgument(f"{where}: must begin with the trigger, and end with a text")
    parse_schema(json.dumps(content["json_schema"]), f"{where}.content.json_schema", cost)


def _arguments(function: ToolFunction) -> Any:
    if not function.strict:
        return json.loads(OBJECT)
    return parse_schema(json.dumps(function.parameters), function.where)
