"""What single tokens stand for, in bytes: they need not be whole characters."""

from __future__ import annotations

from cog_triton.detokenize import token_bytes
from cog_triton.tokenizer import EngineTokenizer


class TokenText:
    """Remembers the bytes of each token it was asked for."""

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._known: dict[int, bytes] = {}

    def raw(self, token_id: int) -> bytes:
        """See `token_bytes`."""
        if token_id not in self._known:
            self._known[token_id] = token_bytes(self._tokenizer, token_id)
        return self._known[token_id]
