"""Log probabilities as OpenAI's objects: of a chat's tokens, and of a completion's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cog_triton.serving.generation import TokenLogProb
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
