"""Stop words over token ids: cut from the output, which is held back while one may begin."""

from __future__ import annotations

from collections.abc import Sequence

Tokens = list[tuple[int, float]]


class StopWords:
    """Stop word filter of one request: (token id, log probability) in, the same out."""

    def __init__(self, words: Sequence[tuple[int, ...]], min_tokens: int) -> None:
        """A word that ends within the first `min_tokens` tokens does not count."""
        self._words = words
        self._min_tokens = min_tokens
        self._longest = max(map(len, words), default=0)
        self._tail: list[int] = []
        self._held: Tokens = []
        self.count = 0

    def add(self, token: int, log_prob: float) -> bool:
        """Append a token; returns whether the output now ends in a stop word, which is then cut."""
        self.count += 1
        self._held.append((token, log_prob))
        if not self._words:
            return False
        self._tail.append(token)
        del self._tail[: -self._longest]
        if self.count <= self._min_tokens:
            return False
        tail = tuple(self._tail)
        matched = max((len(word) for word in self._words if tail[-len(word) :] == word), default=0)
        if matched:
            del self._held[-matched:]
        return matched > 0

    def ready(self) -> Tokens:
        """Remove and return the tokens that cannot be part of a stop word any more."""
        size = len(self._held) - self._partial()
        ready, self._held = self._held[:size], self._held[size:]
        return ready

    def rest(self) -> Tokens:
        """Remove and return all tokens left, at the end of the output."""
        rest, self._held = self._held, []
        return rest

    def _partial(self) -> int:
        """Number of trailing tokens that may be the beginning of a stop word."""
        return max(
            (
                size
                for word in self._words
                for size in range(1, min(len(word), len(self._held) + 1))
                if tuple(self._tail[-size:]) == word[:size]
            ),
            default=0,
        )
