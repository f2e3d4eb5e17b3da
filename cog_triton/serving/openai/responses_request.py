"""Request of /v1/responses, translated to one of /v1/chat/completions.

What it refers to of an earlier response is told by the store, where there is one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, WithJsonSchema

from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai.request_body import FieldNames, PlacedMessage, given_fields
from cog_triton.serving.openai.requests import ChatFields, ChatRequest, validate
from cog_triton.system.log_notes import log_once
from cog_triton.system.printable import shortened
from cog_triton.text.sampling import MAX_TOKENS

_log = logging.getLogger(__name__)

Object = dict[str, Any]
OBJECTS: Object = {"type": "array", "items": {"type": "object"}}
TEXT_OR_OBJECTS: Object = {"type": ["string", "array"], "items": {"type": "object"}}


class ResponsesRequest(ChatFields):
    """POST /v1/responses; `input` is a text, or items. The chat has, or refuses, other fields."""

    model_config = ConfigDict(extra="allow")

    input: Annotated[Any, WithJsonSchema(TEXT_OR_OBJECTS)]
    instructions: Any = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    reasoning: Any = None
    text: dict[str, Any] | None = None
    tools: Annotated[Any, WithJsonSchema(OBJECTS)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None


_IGNORED = (
    *("metadata", "user", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("include", "truncation", "max_tool_calls", "stream_options", "request_id", "priority"),
    *("access_programs", "client_metadata", "context_management"),
)
_REFUSED = {
    "background_options": "a response in the background begins at once",
    "conversation": "send previous_response_id, or the whole conversation as input",
    "image": "images are not compressed here",
    "messages": "send input",
    "prompt": "there are no stored prompts; send input",
    "top_logprobs": "use /v1/chat/completions",
}
KNOWN = {*ResponsesRequest.model_fields, *_IGNORED, *_REFUSED}
_SAME = ChatRequest.model_fields.keys() & ResponsesRequest.model_fields.keys() - {"tools"}
_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
)
"""Beginnings of the types of tools that OpenAI's own server runs, and the client never does."""
_TEXT_PARTS = ("input_text", "output_text", "text")
NAMES = (
    (r"response_format(?:\.json_schema)?", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages(?!: not supported)", "input"),
    (r"(tools(?:\[\d+\]|\.\d+))\.function", r"\1"),
    (r"tool_choice\.(?:function|allowed_tools)(\.tools\[\d+\])?(?:\.function)?", r"tool_choice\1"),
)
"""Fields of a chat, and their names here."""


class Translated(NamedTuple):
    """Body of the chat, and the fields of the request that its response repeats.

    `namespaces` has the namespace and the name of each tool in one, by its name in the chat.
    """

    chat: Object
    echoed: Object
    namespaces: Mapping[str, tuple[str, str]]


class StoreFields(NamedTuple):
    """What a request says of the store, its own `input` as JSON among it."""

    store: bool
    background: bool
    previous: str | None
    input: str


_NO_STORE = "nothing is stored here (RESPONSE_STORE_BYTES)"


def read(body: Any) -> ResponsesRequest:
    """A request from its JSON value; raises E1005."""
    return validate(ResponsesRequest, given_fields(body, _REFUSED))


def store_fields(request: ResponsesRequest, *, has_store: bool) -> StoreFields:
    """The fields of a request; raises E1005 for what needs a store."""
    stored, background = request.store is not False, bool(request.background)
    if not has_store and request.previous_response_id:
        rule = "send the whole conversation as input"
        raise InvalidArgument(f"previous_response_id: not supported: {_NO_STORE}; {rule}")
    if background and not has_store:
        raise InvalidArgument(f"background: not supported: {_NO_STORE}")
    if background and not stored:
        raise InvalidArgument("background: only with store, which keeps what nobody waits for")
    kept = stored and has_store
    items = request.input if kept else []
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    return StoreFields(kept, background, request.previous_response_id or None, json.dumps(items))


def translate(
    request: ResponsesRequest,
    defaults: Mapping[str, float] = MappingProxyType({}),
    names: FieldNames | None = None,
    earlier: Sequence[Any] = (),
) -> Translated:
    """The chat that a request asks for; raises E1005 for what a chat cannot have.

    `defaults` are the model's own, of sampling parameters. `names` gets the places of messages;
    `earlier` are items of the conversation before.
    """
    names = names or FieldNames(NAMES)
    given = {name: value for name, value in request if value is not None}
    if given.get("n", 1) != 1:
        raise InvalidArgument(f"n={shortened(given['n'])}: a response is one answer")
    # The chat's parser knows those that are not known here, or what to say of them.
    chat = {name: value for name, value in given.items() if name in _SAME or name not in KNOWN}
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if isinstance(request.reasoning, dict) and request.reasoning.get("effort"):
        chat["reasoning_effort"] = request.reasoning["effort"]
    chat["messages"] = names.messages(_messages(request, earlier))
    tools = list(_tools("tools", given.get("tools", [])))
    if tools:
        names.place_tools(tool.where for tool in tools)
        chat["tools"] = [{"type": "function", "function": tool.function} for tool in tools]
    if "tool_choice" in given:
        chat["tool_choice"] = _tool_choice(given["tool_choice"])
    if (form := _format(request.text)) is not None:
        chat["response_format"] = form
    namespaces = {tool.function["name"]: tool.origin for tool in tools if tool.origin is not None}
    return Translated(chat, _echoed({**defaults, **given}), namespaces)


_ECHOED: Object = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls")),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier")),
    "frequency_penalty": 0.0,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}
"""Fields that a response repeats, and their defaults."""


def _echoed(given: Mapping[str, Any]) -> Object:
    found = {name: given.get(name, default) for name, default in _ECHOED.items()}
    unset = dict.fromkeys(("description", "parameters", "strict"))
    found["tools"] = [unset | tool for tool in found["tools"]]
    user = {"user": given["user"]} if "user" in given else {}
    return {**user, **found, "truncation": "disabled"}


def as_list(name: str, value: Any) -> list[Any]:
    """A field that must be a list; raises E1005."""
    if not isinstance(value, list):
        raise InvalidArgument(f"{name}: must be a list")
    return value


def _messages(request: ResponsesRequest, earlier: Sequence[Any]) -> Iterator[PlacedMessage]:
    if request.instructions is not None:
        instructions = {"role": "system", "content": request.instructions}
        yield PlacedMessage(instructions, "instructions")
    items = request.input
    if isinstance(items, str) and not earlier:
        yield PlacedMessage({"role": "user", "content": items}, "input")
        return
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    held: PlacedMessage | None = None  # of the assistant, whose parts are items of their own
    for place, item in enumerate([*earlier, *as_list("input", items)], -len(earlier)):
        where = f"input[{place}]" if place >= 0 else "previous_response_id"
        if not isinstance(item, dict):
            raise InvalidArgument(f"{where}: must be an object")
        part = _of_assistant(where, item)
        if part is not None:
            message = held.message if held else {}
            if held is None or (
                "content" in part and ("content" in message or "tool_calls" in message)
            ):
                if held is not None:
                    yield held
                held = PlacedMessage(message := {"role": "assistant"}, where)
            calls = message.get("tool_calls", [])
            calls += part.get("tool_calls", [])
            message |= part | ({"tool_calls": calls} if calls else {})
            continue
        if held is not None:
            yield held
            held = None
        message = _message(where, item)
        parts = message["content"] if isinstance(message["content"], list) else []
        name = f"{where}.{'output' if message['role'] == 'tool' else 'content'}"
        yield PlacedMessage(message, where, [f"{name}[{at}]" for at in range(len(parts))])
    if held is not None:
        yield held


def _of_assistant(where: str, item: Object) -> Object | None:
    """A part of a message of the assistant; None if the item is no such part."""
    kind = item.get("type", "message")
    if kind == "function_call":
        name = _full_name(item.get("namespace"), item.get("name"))
        call = {"name": name, "arguments": item.get("arguments")}
        return {"tool_calls": [{"id": item.get("call_id"), "type": "function", "function": call}]}
    if kind == "reasoning":
        parts = as_list(f"{where}.content", item.get("content") or [])
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return {"reasoning_content": "".join(text for text in texts if isinstance(text, str))}
    if kind == "message" and item.get("role") == "assistant":
        return {"content": _content(f"{where}.content", item.get("content"))}
    return None


def _message(where: str, item: Object) -> Object:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        content = _content(f"{where}.output", item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind != "message":
        raise InvalidArgument(
            f"{where}.type={shortened(kind)}: must be message, function_call,"
            " function_call_output or reasoning"
        )
    content = _content(f"{where}.content", item.get("content"))
    return {"role": item.get("role"), "content": content}


def _content(where: str, content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_part(f"{where}[{place}]", part) for place, part in enumerate(content)]


def _part(where: str, part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind == "input_image":
        if part.get("file_id"):
            raise InvalidArgument(f"{where}.file_id: not supported: no files are kept here")
        image = {"url": part.get("image_url"), "detail": part.get("detail")}
        return {"type": "image_url", "image_url": image}
    raise InvalidArgument(
        f"{where}.type={shortened(kind)}: not supported: must be input_text or input_image"
    )


class _PlacedTool(NamedTuple):
    """Function of a chat, its place in the request, and its namespace and name there, if any."""

    where: str
    function: Object
    origin: tuple[str, str] | None


def _tools(where: str, tools: Any, namespace: str | None = None) -> Iterator[_PlacedTool]:
    """The functions, those in namespaces among them; without tools that OpenAI's server runs."""
    for place, tool in enumerate(as_list(where, tools)):
        at = f"{where}[{place}]"
        kind, name = (
            (tool.get("type"), tool.get("name")) if isinstance(tool, dict) else (None, None)
        )
        if kind == "namespace" and namespace is None and isinstance(name, str):
            yield from _tools(f"{at}.tools", tool.get("tools"), name)
        elif kind == "function":
            function = {key: value for key, value in tool.items() if value is not None}
            del function["type"]
            origin = None
            if namespace and isinstance(name, str):
                function["name"], origin = _full_name(namespace, name), (namespace, name)
            yield _PlacedTool(at, function, origin)
        elif isinstance(kind, str) and kind.startswith(_HOSTED):
            log_once(_log, f"tools of type {kind[:80]!r} are left out: this server runs none")
        else:
            raise InvalidArgument(
                f"{at}.type={shortened(kind)}: not supported: only functions are, which the"
                " client calls"
            )


def _full_name(namespace: Any, name: Any) -> Any:
    """The name of a function in the chat: names of several namespaces may be the same."""
    return f"{namespace}__{name}" if namespace and isinstance(namespace, str) else name


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        name = _full_name(choice.get("namespace"), choice["name"])
        return {"type": "function", "function": {"name": name}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = as_list("tool_choice.tools", choice.get("tools"))
        allowed = {"mode": choice.get("mode"), "tools": [_tool_choice(tool) for tool in tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _format(text: Object | None) -> Any:
    form = (text or {}).get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}
