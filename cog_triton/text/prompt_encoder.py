"""Prompt encoder with a length limit: refuses a prompt that cannot fit before encoding all of it.

Encoding takes some 150 bytes of memory for each byte of text, and text has no limit but that of
the request. So a long text is counted in pieces first, and encoded as a whole only when that has
not shown that it is too long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from cog_triton.errors import PromptTooLong
from cog_triton.system import process_tuning
from cog_triton.text.tokenizer import EngineTokenizer

WHOLE_BYTES = 64 << 10
"""Text of up to this size is always encoded whole: it costs no more than 15 MB, for 10 ms."""
PIECE_CHARS = 64 << 10
_AT_ONCE = 2
_CUT_TOKENS = 64


def prompt_too_long(length: int | str, limit: int) -> PromptTooLong:
    """E1002 for a prompt of `length` tokens."""
    return PromptTooLong(f"Prompt length ({length}) exceeds maximum input length ({limit})")


class PromptEncoder:
    """Encodes prompts of at most `limit` tokens, or of any length without a limit; thread-safe.

    Of long prompts, only a few are encoded at a time, and others wait.
    """

    def __init__(self, tokenizer: EngineTokenizer, limit: int | None) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        added = tokenizer.tokenizer.get_added_tokens_decoder().values()
        # A cut changes the tokens around it: those of a word, or of a special token that it splits.
        self._cut_tokens = max([_CUT_TOKENS, *(2 * len(t.content.encode()) for t in added)])
        self._bos = tokenizer.bos_token
        self._bos_id = None if self._bos is None else tokenizer.token_id(self._bos)
        self._bos_is_exact = any(
            token.content == self._bos
            and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
            for token in added
        )
        self._turns = threading.BoundedSemaphore(_AT_ONCE)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, exactly as of `EngineTokenizer.encode`.

        Raises E1002 for a long text that is certain not to fit; what is returned may still exceed
        the limit.
        """
        if not self.is_long(text):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        text = self._without_repeated_bos(text)
        with self._turns:
            try:
                self._refuse_by_pieces(text)
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            finally:
                process_tuning.return_freed_memory()

    def check(self, text: str) -> None:
        """Raise E1002 for a long text that is certain not to fit."""
        if self.is_long(text):
            text = self._without_repeated_bos(text)
            with self._turns:
                self._refuse_by_pieces(text)

    def is_long(self, text: str) -> bool:
        """Whether `text` is one of those that wait and are counted first."""
        if self._limit is None or 4 * len(text) <= WHOLE_BYTES:
            return False
        return _size(text) > max(WHOLE_BYTES, self._limit)

    def _without_repeated_bos(self, text: str) -> str:
        """`text` with one BOS in place of many at its start, of which encoding keeps one."""
        if not self._bos or not self._bos_is_exact or not text.startswith(self._bos * 2):
            return text
        start = 0
        for run in (self._bos * 4096, self._bos):
            while text.startswith(run, start):
                start += len(run)
        return text[start - len(self._bos) :]

    def _refuse_by_pieces(self, text: str) -> None:
        """Count what is certain to be tokens of the whole: those of pieces, less some at cuts."""
        least = 0
        for piece in _pieces(text):
            ids = self._tokenizer.encode(piece, add_special_tokens=False)
            tokens = len(ids)
            if self._bos_id is not None and not self._bos_is_exact:
                tokens -= ids.count(self._bos_id)
            least += max(tokens - self._cut_tokens, 0)
            if self._limit is not None and least > self._limit:
                raise prompt_too_long(f"more than {least - 1}", self._limit)


def _size(text: str) -> int:
    """The size of `text` in UTF-8, without a copy of all of it."""
    if text.isascii():
        return len(text)
    starts = range(0, len(text), PIECE_CHARS)
    return sum(
        len(text[start : start + PIECE_CHARS].encode("utf-8", "replace")) for start in starts
    )


def _pieces(text: str) -> Iterator[str]:
    """Consecutive pieces of `text`, cut in front of a space where there is one near the end."""
    start = 0
    while start < len(text):
        end = start + PIECE_CHARS
        if end < len(text):
            end = max(text.rfind(" ", end - PIECE_CHARS // 8, end), 0) or end
        yield text[start:end]
        start = end
