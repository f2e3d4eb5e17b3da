"""Request of /v1/messages, Anthropic's API, translated to one of /v1/chat/completions.

Consecutive turns of one role are one, as there. Of its tools only those are that the client calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, WithJsonSchema

from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai.request_body import FieldNames, PlacedMessage, given_fields
from cog_triton.serving.openai.requests import ChatFields, ChatRequest, HashableFailFast, validate
from cog_triton.serving.openai.responses_request import OBJECTS, TEXT_OR_OBJECTS, as_list
from cog_triton.system.log_notes import log_once, note_unknown
from cog_triton.system.printable import shortened
from cog_triton.text.sampling import MAX_TOKENS

_log = logging.getLogger(__name__)

Object = dict[str, Any]


class CountTokensRequest(ChatFields):
    """POST /v1/messages/count_tokens: each turn has a role and content, a text or blocks."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[Any, WithJsonSchema({**OBJECTS, "minItems": 1})]
    system: Annotated[Any, WithJsonSchema(TEXT_OR_OBJECTS)] = None
    stop_sequences: Annotated[list[str], HashableFailFast()] | None = None
    tools: Annotated[Any, WithJsonSchema(OBJECTS)] = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    output_format: Object | None = None
    context_management: Any = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)


_IGNORED = (
    *("metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id", "speed"),
    *("workspace_id", "billing_policy", "fallback_credit_token", "fallbacks", "diagnostics"),
    *("betas", "request_id", "priority"),
)
_REFUSED = {
    "container": "no code is run here",
    "mcp_servers": "only the client's own tools are",
    "compaction": "conversations are not summarized here",
    "thread": "nothing is stored; send the whole conversation as messages",
}
KNOWN = {*MessagesRequest.model_fields, *_IGNORED, *_REFUSED}
KNOWN_OF_TOOLS = {
    *("name", "description", "input_schema", "type", "strict", "input_examples"),
    *("cache_control", "eager_input_streaming", "defer_loading", "allowed_callers"),
}
_BILLING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
_ROLES = ("user", "assistant", "system")
NAMES = (
    ("stop", "stop_sequences"),
    (r"response_format(?:\.json_schema)?", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    (r"(tools(?:\[\d+\]|\.\d+))\.function\.parameters", r"\1.input_schema"),
    (r"(tools(?:\[\d+\]|\.\d+))\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
)
"""Fields of a chat, and their names here."""


class Block(NamedTuple):
    """Block of a turn, and its name in errors."""

    where: str
    given: Object

    @property
    def kind(self) -> Any:
        return self.given.get("type")

    def text(self, name: str) -> str:
        """A field that must be text."""
        if not isinstance(value := self.given.get(name), str):
            raise InvalidArgument(f"{self.where}.{name}={shortened(value)}: must be text")
        return value

    def refused(self, allowed: str) -> InvalidArgument:
        return InvalidArgument(
            f"{self.where}.type={shortened(self.kind)}: not supported: must be {allowed}"
        )


def translate(
    body: Any,
    *,
    images: bool,
    kind: type[CountTokensRequest] = MessagesRequest,
    names: FieldNames | None = None,
) -> Object:
    """The chat that a request's JSON value asks for; raises E1005 for what a chat cannot have.

    `images` says whether the model takes any; `names` gets the places of messages.
    """
    names = names or FieldNames(NAMES)
    request = validate(kind, given_fields(body, _REFUSED))
    given = {name: value for name, value in request if value is not None}
    chat = {name: given[name] for name in ChatFields.model_fields if name in given}
    chat |= _others(given)
    if request.stop_sequences is not None:
        chat["stop"] = request.stop_sequences
    chat["messages"] = names.messages(_messages(given, images=images))
    if tools := given.get("tools"):
        chat["tools"] = [
            _tool(Block(f"tools[{place}]", _object(f"tools[{place}]", tool)))
            for place, tool in enumerate(as_list("tools", tools))
        ]
    if request.tool_choice is not None:
        chat |= _tool_choice(request.tool_choice)
    return chat | _reasoning(request) | _format(request)


def _others(given: Mapping[str, Any]) -> Object:
    """Fields of neither API, for the chat's parser, which knows what to say of them."""
    found = {name: value for name, value in given.items() if name not in KNOWN}
    for name in found:
        if name in ChatRequest.model_fields:
            raise InvalidArgument(f"{name}: is a field of chats, not of messages")
    if given.get("context_management"):
        log_once(_log, "context_management: conversations are not shortened here")
    return found


def _reasoning(request: CountTokensRequest) -> Object:
    """Fields of the chat that say whether, and how much, the model reasons."""
    effort, thinking = (request.output_config or {}).get("effort"), request.thinking
    found = {} if effort is None else {"reasoning_effort": effort}
    if thinking is None:
        return found
    kind = thinking.get("type")
    if kind not in _THINKING:
        raise InvalidArgument(f"thinking.type={shortened(kind)}: must be {', '.join(_THINKING)}")
    if "budget_tokens" in thinking:
        log_once(_log, "thinking.budget_tokens: max_tokens alone bounds the model's reasoning")
    if kind == "disabled":
        return {"reasoning_effort": "none", "include_reasoning": False}
    omitted = {"include_reasoning": False} if thinking.get("display") == "omitted" else {}
    return {"reasoning_effort": "medium", **found, **omitted}


def _format(request: CountTokensRequest) -> Object:
    form = (request.output_config or {}).get("format", request.output_format)
    if form is None:
        return {}
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise InvalidArgument(f"output_config.format={shortened(form)}: must be of json_schema")
    guide = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return {"response_format": guide}


def _messages(given: Mapping[str, Any], *, images: bool) -> Iterator[PlacedMessage]:
    if "system" in given:
        parts = [_part(block, "text") for block in _blocks("system", given["system"])]
        # Claude Code's differs with each request, so that no prompt would begin as the one before.
        content = [part for part in parts if not part["text"].startswith(_BILLING)]
        if content or not parts:
            yield PlacedMessage({"role": "system", "content": content}, "system")
    turns = [
        _turn(f"messages[{place}]", item)
        for place, item in enumerate(as_list("messages", given["messages"]))
    ]
    if not turns:
        raise InvalidArgument("messages: the list is empty; there is nothing to answer")
    if turns[-1][0] == "assistant":
        where = f"messages[{len(turns) - 1}]"
        raise InvalidArgument(
            f"{where}.role='assistant': the answer is always a new message: end with one of 'user'"
        )
    first = 0
    for role, group in groupby(turns, lambda turn: turn[0]):
        several = list(group)
        blocks = [block for _, own in several for block in own]
        where = f"messages[{first}]"
        first += len(several)
        if role == "assistant":
            yield PlacedMessage(_assistant(blocks), where)
        else:
            yield from _user(role, where, blocks, images=images)


def _turn(where: str, item: Any) -> tuple[str, Sequence[Block]]:
    turn = _object(where, item)
    if (role := turn.get("role")) not in _ROLES:
        raise InvalidArgument(f"{where}.role={shortened(role)}: must be {', '.join(_ROLES)}")
    return str(role), _blocks(f"{where}.content", turn.get("content"))


def _blocks(where: str, content: Any) -> Sequence[Block]:
    """Blocks of a content; a text is one."""
    if isinstance(content, str):
        return [Block(where, {"type": "text", "text": content})]
    return [
        Block(f"{where}[{place}]", _object(f"{where}[{place}]", item))
        for place, item in enumerate(as_list(where, content))
    ]


def _user(
    role: str, where: str, blocks: Sequence[Block], *, images: bool
) -> Iterator[PlacedMessage]:
    """The results of tools, then what the user says; it has the images of both."""
    allowed = "text or image" if images else "text"
    shown: list[tuple[str, Object]] = []
    parts: list[tuple[str, Object]] = []
    for block in blocks:
        if block.kind != "tool_result":
            parts.append((block.where, _part(block, f"tool_result, {allowed}")))
            continue
        if parts:
            raise InvalidArgument(f"{block.where}: tool_result comes before text and images")
        result = [
            (each.where, _part(each, allowed))
            for each in _blocks(f"{block.where}.content", block.given.get("content") or "")
        ]
        texts = [part["text"] for _, part in result if part["type"] == "text"]
        shown += [item for item in result if item[1]["type"] != "text"]
        # Chat templates know of no errors.
        text = "\n".join(["Error:"] * bool(block.given.get("is_error")) + texts)
        tool = {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": text}
        yield PlacedMessage(tool, block.where)
    if content := [*shown, *parts]:
        message = {"role": role, "content": [part for _, part in content]}
        yield PlacedMessage(message, where, [place for place, _ in content])


def _part(block: Block, allowed: str) -> Object:
    if block.kind == "text":
        return {"type": "text", "text": block.text("text")}
    if block.kind != "image" or "image" not in allowed:
        raise block.refused(allowed)
    where = f"{block.where}.source"
    source = Block(where, _object(where, block.given.get("source")))
    match source.kind:
        case "base64":
            url = f"data:{source.text('media_type')};base64,{source.text('data')}"
        case "url":
            url = source.text("url")
        case _:
            raise source.refused("base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(blocks: Sequence[Block]) -> Object:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.kind:
            case "text":
                texts.append({"type": "text", "text": block.text("text")})
            case "thinking":
                thoughts.append(block.text("thinking"))
            case "redacted_thinking":  # encrypted, for Anthropic's models alone
                continue
            case "tool_use":
                calls.append(_call(block))
            case _:
                raise block.refused("text, thinking or tool_use")
    message: Object = {"role": "assistant", "content": texts or ""}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: Block) -> Object:
    arguments = block.given.get("input") or {}
    try:
        function = {"name": block.text("name"), "arguments": json.dumps(arguments)}
    except RecursionError:
        raise InvalidArgument(f"{block.where}.input: is nested too deeply") from None
    return {"id": block.text("id"), "type": "function", "function": function}


def _tool(tool: Block) -> Object:
    if tool.kind not in (None, "custom"):
        raise tool.refused("custom: a tool that the client calls")
    note_unknown(_log, "key of a tool", tool.given.keys() - KNOWN_OF_TOOLS)
    where = f"{tool.where}.input_schema"
    function = {
        "name": tool.text("name"),
        "parameters": _object(where, tool.given.get("input_schema")),
        **{key: tool.given[key] for key in ("description", "strict") if tool.given.get(key)},
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Object) -> Object:
    kind = choice.get("type")
    found: Object = {}
    if "disable_parallel_tool_use" in choice:
        found["parallel_tool_calls"] = choice["disable_parallel_tool_use"] is not True
    if kind == "tool":
        name = Block("tool_choice", choice).text("name")
        return {**found, "tool_choice": {"type": "function", "function": {"name": name}}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidArgument(
            f"tool_choice.type={shortened(kind)}: must be auto, any, tool or none"
        )
    return {**found, "tool_choice": _CHOICES[kind]}


def _object(where: str, value: Any) -> Object:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where}={shortened(value)}: must be an object")
    return value
