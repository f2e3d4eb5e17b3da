"""Token ids of one sequence to the text its reader gets: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from cog_triton.text.detokenize import Detokenizer
from cog_triton.text.stop_strings import StopMatcher
from cog_triton.text.tokenizer import EngineTokenizer


class TextStream:
    """Stop strings count only in text after the first `min_tokens` tokens, as in vLLM."""

    def __init__(
        self, tokenizer: EngineTokenizer, stops: Sequence[str], *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer.tokenizer)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.token_count = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has matched; there is no more text then."""
        return self._matcher.matched is not None

    def echo(self, prompt_ids: Sequence[int]) -> str:
        """The prompt's own text, to come before the first `feed`."""
        return self._detokenizer.feed(prompt_ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make final."""
        exempt = max(self._min_tokens - self.token_count, 0)
        self.token_count += len(token_ids)
        first, rest = token_ids[:exempt], token_ids[exempt:]
        text = self._detokenizer.feed(first) if first else ""
        return text + self._matcher.feed(self._detokenizer.feed(rest)) if rest else text

    def finish(self) -> str:
        """What was held back: the beginning of a character or of a stop string."""
        return self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()
