"""Objects of OpenAI's answers: the delta of a chunk, the whole message, log probabilities."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from typing import Any

from cog_triton.serving.generation import TokenLogProb
from cog_triton.serving.openai.parsers.deltas import (
    Answer,
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
)
from cog_triton.text.detokenize import TokenText

Object = dict[str, Any]


def chat_log_probs(token_text: TokenText, log_probs: Iterable[TokenLogProb]) -> Object:
    """The `logprobs` of a chat's choice."""

    def told(token_id: int, log_prob: float) -> Object:
        raw = token_text.raw(token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": log_prob,
            "bytes": list(raw),
        }

    content = [
        {**told(token_id, log_prob), "top_logprobs": [told(*pair) for pair in top]}
        for token_id, log_prob, top in log_probs
    ]
    return {"content": content, "refusal": None}


class CompletionLogProbs:
    """Builder of a completion's `logprobs`, piece by piece.

    `text_offset` is where a token begins in the text, in characters.
    """

    def __init__(self, token_text: TokenText, *, top: bool) -> None:
        """`top` says whether the likeliest tokens are told."""
        self._token_text = token_text
        self._top = top
        self._offset = 0

    def build(self, log_probs: Iterable[TokenLogProb], first_id: int | None = None) -> Object:
        """The object of tokens that follow those before.

        `first_id` is the first token of an echoed prompt, whose probability nobody knows.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets = []
        if first_id is not None:
            tokens.append(self._text(first_id))
            values.append(None)
            tops.append(None)
        for token_id, log_prob, top in log_probs:
            tokens.append(self._text(token_id))
            values.append(log_prob)
            # The likeliest first: of two tokens with the same text, its value stays.
            tops.append({self._text(other): value for other, value in reversed(top)})
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return self._token_text.raw(token_id).decode("utf-8", "replace")


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
