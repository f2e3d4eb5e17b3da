"""Deltas of an answer as OpenAI's objects: the delta of a chunk, and the whole message."""

from __future__ import annotations

import secrets
import string
from typing import Any

from cog_triton.serving.openai.parsers.deltas import (
    Answer,
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
)

Object = dict[str, Any]
_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9


def call_id() -> str:
    """A new id of a tool call: nine letters and digits, as Mistral's templates demand."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


def delta_object(delta: Delta) -> Object:
    """The `delta` of a chunk; reasoning has the name of DeepSeek's API, and vLLM's."""
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallStart(index, name):
            return {"tool_calls": [{"index": index, **_call(name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_object(answer: Answer) -> Object:
    """The whole message; its content is null if there is none beside calls or reasoning."""
    message: Object = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [_call(call.name, call.arguments) for call in answer.calls]
    if not answer.content and (answer.reasoning or answer.calls):
        message["content"] = None
    return message


def _call(name: str, arguments: str) -> Object:
    return {
        "id": call_id(),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
