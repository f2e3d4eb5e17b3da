"""Log probabilities as OpenAI's objects: of a chat's tokens, and of a completion's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cog_triton.serving.generation import TokenLogProb
from cog_triton.text.detokenize import TokenText

Object = dict[str, Any]


def chat_log_probs(token_text: TokenText, log_probs: Iterable[TokenLogProb]) -> Object:
    """The `logprobs` of a chat's choice."""
    content = []
    for token_id, log_prob in log_probs:
        raw = token_text.raw(token_id)
        content.append(
            {
                "token": raw.decode("utf-8", "replace"),
                "logprob": log_prob,
                "bytes": list(raw),
                "top_logprobs": [],
            }
        )
    return {"content": content, "refusal": None}


class CompletionLogProbs:
    """Builder of a completion's `logprobs`, piece by piece.

    `text_offset` is where a token begins in the text, in characters.
    """

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._offset = 0

    def build(self, log_probs: Iterable[TokenLogProb]) -> Object:
        """The object of tokens that follow those before."""
        tokens, values, offsets = [], [], []
        for token_id, log_prob in log_probs:
            token = self._token_text.raw(token_id).decode("utf-8", "replace")
            tokens.append(token)
            values.append(log_prob)
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": None,
            "text_offset": offsets,
        }
