"""Text stream of one sequence: token ids decoded to whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from cog_triton.text.detokenize import Detokenizer
from cog_triton.text.stop_strings import StopMatcher
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
        self._detokenizer = Detokenizer(tokenizer.tokenizer, visible)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self._stopped_by_id = False
        self.token_count = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string or token has come; no text follows then."""
        return self._stopped_by_id or self._matcher.matched is not None

    def echo(self, prompt_ids: Sequence[int]) -> str:
        """Text of the prompt; call before the first `feed`."""
        return self._detokenizer.feed(prompt_ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
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
