"""Stop strings in the text stream of one sequence, across chunk borders.

Constant cost a character.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from cog_triton.errors import InvalidArgument
from cog_triton.text.tokenizer import EngineTokenizer


class TextStream:
    """Detokenizer and stop matcher in one; stop strings count after `min_tokens`, as in vLLM."""

    def __init__(
        self,
        tokenizer: EngineTokenizer,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        visible: Collection[str] = (),
        stop_ids: Set[int] = frozenset(),
    ) -> None:
        """`visible` are special tokens that are part of the text.

        The first token among `stop_ids`, after `min_tokens`, ends the text before it.
        """
        self._detokenizer = tokenizer.detokenizer(visible)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self._stopped_by_id = False
        self.token_count = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string or token has come; no text follows then."""
        return self._stopped_by_id or self._matcher.matched is not None

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the text."""
        return self._matcher.matched

    def echo(self, prompt_ids: Sequence[int]) -> str:
        """Text of the prompt; call before the first `feed`."""
        return self._detokenizer.feed(prompt_ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        if self.token_count >= self._min_tokens and not self._stop_ids:
            self.token_count += len(token_ids)
            return self._matcher.feed(self._detokenizer.feed(token_ids))
        exempt = max(self._min_tokens - self.token_count, 0)
        if self._stop_ids:
            token_ids = self._until_stop(token_ids, exempt)
        self.token_count += len(token_ids)
        first, rest = token_ids[:exempt], token_ids[exempt:]
        text = self._detokenizer.feed(first) if first else ""
        return text + self._matcher.feed(self._detokenizer.feed(rest)) if rest else text

    def _until_stop(self, token_ids: Sequence[int], exempt: int) -> Sequence[int]:
        for place in range(exempt, len(token_ids)):
            if token_ids[place] in self._stop_ids:
                self._stopped_by_id = True
                return token_ids[:place]
        return token_ids

    def finish(self, *, cut_characters: bool = True) -> str:
        """Text that was held back: the start of a stop string, and of a character as U+FFFD.

        Without `cut_characters`, a character whose end is missing is left out.
        """
        rest = self._detokenizer.flush()
        if not cut_characters:
            rest = rest.rstrip("\N{REPLACEMENT CHARACTER}")
        return self._matcher.feed(rest) + self._matcher.flush()


@dataclass(frozen=True, slots=True)
class WordLimits:
    """Limits of a request's stop strings, or other words: how many, and characters of each."""

    count: int
    length: int = 1024

    def parse(self, name: str, text: str) -> list[str]:
        """The words of the comma-separated form; raises E1005 as `check` does."""
        most = self.count * (self.length + 1)
        if len(text) > most:
            raise InvalidArgument(
                f"{name}: has {len(text)} characters; {most} at most (MAX_STOP_SEQUENCES)"
            )
        words = parse_stop_sequences(text)
        self.check(name, words)
        return words

    def check(self, name: str, words: Sequence[str]) -> None:
        """Raise E1005 for too many words, or one that is too long; `name` is the input's."""
        if len(words) > self.count:
            raise InvalidArgument(
                f"{name}: has {len(words)} strings; {self.count} at most (MAX_STOP_SEQUENCES)"
            )
        longest = max(map(len, words), default=0)
        if longest > self.length:
            raise InvalidArgument(
                f"{name}: has a string of {longest} characters; {self.length} at most"
            )


class StopMatcher:
    """Streaming matcher: releases the text before the earliest stop string, and nothing after.

    The occurrence that starts first wins, even when another one is complete sooner; of two that
    start together, the shorter. `matched` names it from the moment nothing can beat it. Text
    that may yet become part of a stop string is held back. Each stop string runs its own
    Knuth-Morris-Pratt automaton, so the cost of a character depends neither on the length of
    the text nor on that of the stops. Raises E1005 for a stop that is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidArgument("stop_sequences: a stop sequence must not be empty")
        self.matched: str | None = None
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._released = 0
        self._seen = 0
        self._found: tuple[int, str] | None = None

    def feed(self, text: str) -> str:
        """Text that is safe to release now; ``""`` after a match."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        self._held += text
        for char in text:
            self._seen += 1
            if self._step(char):
                return self._finish()
        return self._release(self._open_start())

    def flush(self) -> str:
        """Text that was held back, up to a match; call once, after the last text."""
        return "" if self.matched is not None else self._finish()

    def _step(self, char: str) -> bool:
        """Advance by one character; True once the earliest occurrence is certain."""
        for automaton in self._automata:
            if automaton.step(char):
                found = (self._seen - len(automaton.stop), automaton.stop)
                if self._found is None or found[0] < self._found[0]:
                    self._found = found
        return self._found is not None and self._open_start() >= self._found[0]

    def _open_start(self) -> int:
        """Start of the earliest occurrence that is still incomplete."""
        return self._seen - max(automaton.depth for automaton in self._automata)

    def _finish(self) -> str:
        end = self._seen
        if self._found is not None:
            end, self.matched = self._found
        return self._release(end)

    def _release(self, end: int) -> str:
        count = end - self._released
        released, self._held = self._held[:count], self._held[count:]
        self._released = end
        return released


class _Automaton:
    """Knuth-Morris-Pratt automaton; `depth` is the length of the partial match so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.depth = 0
        self._fallback = _fallback(stop)

    def step(self, char: str) -> bool:
        """Advance by one character; whether the text now ends with the stop string."""
        while self.depth and self.stop[self.depth] != char:
            self.depth = self._fallback[self.depth - 1]
        self.depth += self.stop[self.depth] == char
        if self.depth < len(self.stop):
            return False
        self.depth = 0  # only the first occurrence counts
        return True


@lru_cache(maxsize=256)  # the sequences of a request share their stop strings
def _fallback(stop: str) -> Sequence[int]:
    """Length of the longest border of each prefix of `stop`."""
    fallback = [0] * len(stop)
    depth = 0
    for place in range(1, len(stop)):
        while depth and stop[place] != stop[depth]:
            depth = fallback[depth - 1]
        depth += stop[place] == stop[depth]
        fallback[place] = depth
    return fallback


def parse_stop_sequences(text: str | None) -> list[str]:
    """Split the comma-separated form (``<end>,<stop>``); empty items are dropped."""
    return [stop for stop in (text or "").split(",") if stop]
