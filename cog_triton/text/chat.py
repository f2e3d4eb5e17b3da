"""Chat messages in OpenAI's form: validation, and rendering as text.

Calls of tools in them get the form that chat templates expect.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

from cog_triton.errors import BadMessages, CogTritonError, InvalidArgument, UserError, nearest
from cog_triton.system.log_notes import log_once, note_unknown
from cog_triton.system.printable import shortened
from cog_triton.text import client_json
from cog_triton.text.chat_template import render_chat
from cog_triton.text.prompts import RenderedPrompt
from cog_triton.text.tokenizer import EngineTokenizer

_log = logging.getLogger(__name__)

_DETAILS = ("auto", "low", "high")
_PROBE = "a text of 3 words"
_IMAGE = {"type": "image"}
_TEXT = {"type": "text", "text": _PROBE}

Message = dict[str, Any]


class ImageURL(NamedTuple):
    """URL of an image part, and the part's name in errors."""

    where: str
    url: str


def parse_image_part(where: str, part: Mapping[str, Any]) -> ImageURL:
    """The URL of a part ``{"type": "image_url", "image_url": {"url": ..., "detail": ...}}``.

    Raises BadMessages (E1006) naming what is wrong below `where`.
    """
    # `uuid` is vLLM's, for its cache.
    note_unknown(_log, "key of a content part", part.keys() - {"type", "image_url", "uuid"})
    given = part.get("image_url")
    where = f"{where}.image_url"
    if isinstance(given, dict):
        note_unknown(_log, "key of an image_url", given.keys() - {"url", "detail"})
        detail = given.get("detail")
        if detail is not None and detail not in _DETAILS:
            raise BadMessages(
                f"{where}.detail={shortened(detail)}: must be one of {', '.join(_DETAILS)}"
            )
        if detail not in (None, "auto"):
            log_once(_log, "image_url.detail has no effect: the model's own resolution is used")
        given = given.get("url")
    if not isinstance(given, str):
        raise BadMessages(f"{where}.url: must be text: the image's URL")
    return ImageURL(where, given)


@dataclass(frozen=True, slots=True)
class ImageForm:
    """How messages with images are written for a chat template.

    With `reads_parts` the template takes parts; with `only_parts` it takes no plain text as
    content. Else `placeholder` is written for each image, ``{}`` in it being its number from 1.
    """

    reads_parts: bool = False
    only_parts: bool = False
    placeholder: str | None = None

    def write(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them."""
        if self.reads_parts:
            return [_in_parts(message) if self.only_parts else message for message in messages]
        return self._with_placeholders(messages)

    def _with_placeholders(self, messages: Sequence[Message]) -> list[Message]:
        written, number = [], 0
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                lines = []
                for _ in (part for part in content if part["type"] == "image"):
                    number += 1
                    lines.append((self.placeholder or "").replace("{}", str(number)))
                lines += [part["text"] for part in content if part["type"] == "text"]
                message = {**message, "content": "\n".join(lines)}
            written.append(message)
        return written


def image_form(tokenizer: EngineTokenizer, placeholder: str | None) -> ImageForm | None:
    """The form for the tokenizer's chat template, found by rendering it; None if there is none.

    `placeholder` is the model's, if it is known.
    """
    with_image = _rendered(tokenizer, [_IMAGE, _TEXT])
    without = _rendered(tokenizer, [_TEXT])
    if _PROBE in without and _PROBE in with_image and with_image != without:
        as_text = [f"{quote}type{quote}" in with_image for quote in "'\""]
        if not any(as_text):  # the list itself, written out
            return ImageForm(
                reads_parts=True, only_parts=_PROBE not in _rendered(tokenizer, _PROBE)
            )
    if placeholder is not None and _PROBE in _rendered(tokenizer, _PROBE):
        return ImageForm(placeholder=placeholder)
    return None


def _rendered(tokenizer: EngineTokenizer, content: str | list[dict[str, str]]) -> str:
    """What the template makes of one message, empty if it refuses it."""
    try:
        return render_chat([{"role": "user", "content": content}], tokenizer)
    except CogTritonError:
        return ""


def _in_parts(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


ToolCall = dict[str, Any]
UNPARSED = "unparsed_arguments"
"""Argument of an earlier call whose arguments are no JSON object: their text."""
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


def require_unicode(where: str, text: str, refused: type[UserError] = BadMessages) -> str:
    """`text`, `refused` if it has a lone surrogate: JSON can spell one, tokenizers take none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refused(f"{where}: not Unicode text: {error.reason}") from None
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
    """The arguments of a call, or their text where a model wrote no JSON object, or half of one."""
    if text is None:
        return {}
    if not isinstance(text, str):
        raise BadMessages(f"{where}: must be JSON as text, as it was sent")
    require_unicode(where, text)
    if text.strip() in ("", "null"):
        return {}
    try:
        arguments = client_json.parse(text, strict=False)
        if "\\u" in text:  # a lone surrogate can be spelled by an escape, too
            json.dumps(arguments, ensure_ascii=False).encode()
    except ValueError:
        arguments = None
    # Templates call `arguments.items()`, so that text must be in an object.
    return arguments if isinstance(arguments, dict) else {UNPARSED: text}


ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_call_id")
# Keys that clients echo back from responses: accepted while empty, refused with a value.
_EMPTY_ONLY = ("audio", "function_call")
# What servers and libraries add to answers, which come back in the next request.
_IGNORED = ("annotations", "provider_specific_fields", "reasoning_details", "thinking_blocks")
_ONLY_OF = {
    "reasoning": "assistant",
    "refusal": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
    "tool_calls": "assistant",
}
_KNOWN = {*_KEYS, *_EMPTY_ONLY, *_IGNORED, *_ONLY_OF}

_PARTS = ("this model reads text alone; must be 'text'", "must be 'text' or 'image_url'")


def parse_messages(
    value: object, most: int | None = None, images: list[ImageURL] | None = None
) -> list[Message]:
    """Messages as templates expect them; raises BadMessages (E1006) naming the invalid one.

    Each has a role and text as `content`, and what it was sent with of `name`, `tool_calls`,
    `tool_call_id` and `reasoning_content`. Raises InvalidArgument (E1005) for more than `most`
    messages, or parts of one. A `developer` message is one of role `system`, and a content of
    several parts is joined by line breaks, as in vLLM.

    With `images`, which gets their URLs, users' messages may have images: the content of such a
    message is a list of parts of type text or image.
    """
    if not isinstance(value, list):
        raise BadMessages(f"messages: must be a list, not {_kind(value)}")
    if not value:
        raise BadMessages("messages: the list is empty; there is nothing to answer")
    _check_count("messages", value, most)
    for place, item in enumerate(value):
        if isinstance(item, dict) and isinstance(item.get("content"), list):
            _check_count(f"messages[{place}].content", item["content"], most)
    check_value_count(value)
    messages = [_message(f"messages[{place}]", item, images) for place, item in enumerate(value)]
    if not any(_says(message["content"]) or "tool_calls" in message for message in messages):
        raise BadMessages("messages: every content is blank; there is nothing to answer")
    return messages


def render_messages(
    messages: Sequence[Message],
    system_prompt: str | None,
    tokenizer: EngineTokenizer,
    variables: Mapping[str, Any] | None = None,
    images: ImageForm | None = None,
) -> RenderedPrompt:
    """Prompt of `messages`, with `system_prompt` first if they have no system message.

    `variables` are more of what the template reads, such as `tools`; `images` is how it takes the
    images of `messages`. Raises BadMessages (E1006)
    when the model's chat template refuses them, would leave out calls of tools, or there is none.
    """
    has_system = any(message["role"] == "system" for message in messages)
    if system_prompt and not has_system:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if images is not None:
        messages = images.write(messages)
    text = render_chat(messages, tokenizer, variables or {})
    if variables:
        require_unicode("messages, with tools and chat_template_kwargs", text)
    return RenderedPrompt(text, add_special_tokens=False)


def _check_count(where: str, items: Sized, most: int | None) -> None:
    if most is not None and len(items) > most:
        raise InvalidArgument(f"{where}: has {len(items)} items; {most} at most (MAX_MESSAGES)")


def _says(content: str | list[Message]) -> bool:
    return bool(content.strip() if isinstance(content, str) else content)


def _message(where: str, value: object, images: list[ImageURL] | None) -> Message:
    if not isinstance(value, dict):
        raise BadMessages(f"{where}: must be an object with role and content, not {_kind(value)}")
    given = {key: item for key, item in value.items() if item is not None and item != []}
    note_unknown(_log, "message key", value.keys() - _KNOWN)
    for key in _EMPTY_ONLY:
        if key in given:
            raise BadMessages(f"{where}.{key}: is not supported; leave it out")
    role = _role(where, value)
    for key, only in _ONLY_OF.items():
        if key in given and role != only:
            raise BadMessages(f"{where}.{key}: only allowed in messages of role '{only}'")
    message: Message = {"role": role}
    if "tool_calls" in given:
        message["tool_calls"] = parse_tool_calls(f"{where}.tool_calls", given["tool_calls"])
    if role == "assistant":
        # Templates join it to other text, so that it must not be null.
        content = given.get("content") or given.get("refusal") or ""
        message["content"] = _content(where, {"content": content})
    else:
        message["content"] = _content(where, value, images if role == "user" else None)
    if role == "tool":
        at = f"{where}.tool_call_id"
        message["tool_call_id"] = parse_tool_call_id(at, given.get("tool_call_id"))
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    for key, text in (("name", given.get("name")), ("reasoning_content", reasoning)):
        if text is not None:
            if not isinstance(text, str):
                raise BadMessages(f"{where}.{key}: must be text, not {_kind(text)}")
            message[key] = require_unicode(f"{where}.{key}", text)
    return message


def _role(where: str, value: Mapping[str, Any]) -> str:
    role = value.get("role")
    if isinstance(role, str) and role in ROLES:
        return "system" if role == "developer" else role
    if role == "function":
        raise BadMessages(f"{where}.role='function': functions are not supported; use tools")
    shown = shortened(role) if "role" in value else "missing"
    hint = nearest(role, list(ROLES)) if isinstance(role, str) else ""
    raise BadMessages(f"{where}.role: {shown}; must be one of {', '.join(ROLES)}{hint}")


def _content(
    where: str, value: Mapping[str, Any], images: list[ImageURL] | None = None
) -> str | list[Message]:
    content = value.get("content")
    if isinstance(content, str):
        return require_unicode(f"{where}.content", content)
    if not isinstance(content, list):
        found = _kind(content) if "content" in value else "missing"
        raise BadMessages(f"{where}.content: {found}; must be text or a list of text parts")
    parts: list[Message] = []
    for place, part in enumerate(content):
        at = f"{where}.content[{place}]"
        if not isinstance(part, dict):
            raise BadMessages(f"{at}: must be an object with type and text, not {_kind(part)}")
        if part.get("type") == "image_url" and images is not None:
            images.append(parse_image_part(at, part))
            parts.append({"type": "image"})
            continue
        if part.get("type") != "text":
            shown = shortened(part.get("type"))
            raise BadMessages(f"{at}.type={shown}: {_PARTS[images is not None]}")
        note_unknown(_log, "key of a content part", part.keys() - {"type", "text"})
        if not isinstance(part.get("text"), str):
            raise BadMessages(f"{at}.text: must be text, not {_kind(part.get('text'))}")
        parts.append({"type": "text", "text": require_unicode(f"{at}.text", part["text"])})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
