"""Chat messages in OpenAI's form: validation, and rendering to the prompt's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from cog_triton.errors import BadMessages, InvalidArgument, nearest
from cog_triton.text.chat_template import render_chat
from cog_triton.text.prompts import RenderedPrompt
from cog_triton.text.tokenizer import EngineTokenizer

ROLES = ("system", "developer", "user", "assistant")
_REFUSED_ROLES = ("tool", "function")
# Keys that clients echo back from responses: accepted while empty, refused with a value.
_EMPTY_ONLY = (
    "annotations",
    "audio",
    "function_call",
    "name",
    "reasoning",
    "reasoning_content",
    "refusal",
    "tool_call_id",
    "tool_calls",
)

Message = dict[str, str]


def parse_messages(value: object, most: int | None = None) -> list[Message]:
    """Messages as role and text; raises BadMessages (E1006) naming the invalid one.

    Raises InvalidArgument (E1005) for more than `most` messages, or parts of one.
    A `developer` message is one of role `system`, and a content of several parts is joined by
    line breaks, as in vLLM.
    """
    if not isinstance(value, list):
        raise BadMessages(f"messages: must be a list, not {_kind(value)}")
    if not value:
        raise BadMessages("messages: the list is empty; there is nothing to answer")
    _check_count("messages", value, most)
    for place, item in enumerate(value):
        if isinstance(item, dict) and isinstance(item.get("content"), list):
            _check_count(f"messages[{place}].content", item["content"], most)
    messages = [_message(f"messages[{place}]", item) for place, item in enumerate(value)]
    if not any(message["content"].strip() for message in messages):
        raise BadMessages("messages: every content is blank; there is nothing to answer")
    return messages


def render_messages(
    messages: Sequence[Message], system_prompt: str | None, tokenizer: EngineTokenizer
) -> RenderedPrompt:
    """Prompt of `messages`, with `system_prompt` first if they have no system message.

    Raises BadMessages (E1006) when the model's chat template refuses them or there is none.
    """
    has_system = any(message["role"] == "system" for message in messages)
    if system_prompt and not has_system:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return RenderedPrompt(render_chat(messages, tokenizer), add_special_tokens=False)


def _check_count(where: str, items: Sized, most: int | None) -> None:
    if most is not None and len(items) > most:
        raise InvalidArgument(f"{where}: has {len(items)} items; {most} at most (MAX_MESSAGES)")


def _message(where: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise BadMessages(f"{where}: must be an object with role and content, not {_kind(value)}")
    for key, item in value.items():
        if key in ("role", "content"):
            continue
        if key not in _EMPTY_ONLY:
            known = ["role", "content", *_EMPTY_ONLY]
            raise BadMessages(f"{where}.{key}: unknown key{nearest(str(key), known)}")
        if item is not None and item != []:
            raise BadMessages(f"{where}.{key}: is not supported; leave it out")
    return {"role": _role(where, value), "content": _content(where, value)}


def _role(where: str, value: Mapping[str, Any]) -> str:
    role = value.get("role")
    if isinstance(role, str) and role in ROLES:
        return "system" if role == "developer" else role
    if role in _REFUSED_ROLES:
        raise BadMessages(f"{where}.role={role!r}: tools are not supported")
    shown = repr(role)[:80] if "role" in value else "missing"
    hint = nearest(role, list(ROLES)) if isinstance(role, str) else ""
    raise BadMessages(f"{where}.role: {shown}; must be one of {', '.join(ROLES)}{hint}")


def _content(where: str, value: Mapping[str, Any]) -> str:
    content = value.get("content")
    if isinstance(content, str):
        return _text(f"{where}.content", content)
    if not isinstance(content, list):
        found = _kind(content) if "content" in value else "missing"
        raise BadMessages(f"{where}.content: {found}; must be text or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        at = f"{where}.content[{place}]"
        if not isinstance(part, dict):
            raise BadMessages(f"{at}: must be an object with type and text, not {_kind(part)}")
        if part.get("type") != "text":
            shown = repr(part.get("type"))[:80]
            raise BadMessages(f"{at}.type={shown}: this model reads text alone; must be 'text'")
        if unknown := sorted(str(key) for key in part.keys() - {"type", "text"}):
            raise BadMessages(f"{at}.{unknown[0]}: unknown key; a part has type and text")
        if not isinstance(part.get("text"), str):
            raise BadMessages(f"{at}.text: must be text, not {_kind(part.get('text'))}")
        texts.append(_text(f"{at}.text", part["text"]))
    return "\n".join(texts)


def _text(where: str, text: str) -> str:
    """`text`, refused if it has a lone surrogate: JSON can spell one, tokenizers take none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadMessages(f"{where}: not Unicode text: {error.reason}") from None
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
