"""Prompt source: random prompts of a given length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cog_triton.bench.options import Options
from cog_triton.errors import InvalidArgument
from cog_triton.text.tokenizer import EngineTokenizer

DEFAULT_OUTPUT = 128
_ID_RANGE = (100, 900)
"""Range of random token ids without a tokenizer; every vocabulary in use has these."""
_WORDS = tuple(
    """
    the quick brown fox over lazy dog and of to in is that for it on with as at by from this
    be are was or an have not you we all one time can new more out up about who get which go
    me when make like no just him know take people into year your good some could them see
    other than then now look only come its think also back after use two how our work first
    well way even want because any these give day most us water light house night world hand
    part place story small large long right left high low old great same last own state city
    line
    """.split()  # noqa: SIM905 - a line of text reads better than a column of words
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: text, its token ids, and the number of tokens to ask for."""

    text: str
    ids: tuple[int, ...]
    output_tokens: int


class PromptSource:
    """Prompts by request number: the same for the same seed, in any process."""

    def __init__(self, options: Options) -> None:
        """Raises E1005 for a tokenizer without tokens for our words."""
        self._seed = options.seed
        self._input = options.input_lengths
        self._output = options.output_lengths
        self._tokenizer = EngineTokenizer.load(options.tokenizer) if options.tokenizer else None
        self._words: Sequence[str] = _WORDS
        if self._tokenizer:
            self._words = [word for word in _WORDS if len(self._encode(f" {word}")) == 1]
            if not self._words:
                raise InvalidArgument(
                    f"--tokenizer={str(options.tokenizer)!r}: has no token for any of our words"
                )
        self._ready: list[Prompt] = []

    def prepare(self, count: int) -> None:
        """Make the first `count` prompts in advance."""
        self._ready = [self._make(index) for index in range(count)]

    def get(self, index: int) -> Prompt:
        """The prompt of request `index`; negative ones are for warming up."""
        return self._ready[index] if 0 <= index < len(self._ready) else self._make(index)

    def describe(self) -> str:
        """Description of prompt lengths for the report."""
        how = "exact by --tokenizer" if self._tokenizer else "words; --tokenizer makes exact tokens"
        return f"{self._input} ({how})"

    def _make(self, index: int) -> Prompt:
        random = Random(f"{self._seed}:{index}")
        length = self._input.draw(random)
        wanted = self._output.draw(random) if self._output else DEFAULT_OUTPUT
        if self._tokenizer:
            return self._exact(length, wanted, random)
        ids = tuple(random.choices(range(*_ID_RANGE), k=length))
        return Prompt(" ".join(random.choices(_WORDS, k=length)), ids, wanted)

    def _exact(self, length: int, wanted: int, random: Random) -> Prompt:
        """Choose words until they are exactly `length` tokens."""
        words = random.choices(self._words, k=length)
        for _ in range(8):
            text = " ".join(words)
            ids = self._encode(text)
            if len(ids) == length:
                return Prompt(text, tuple(ids), wanted)
            if len(ids) < length:
                words += random.choices(self._words, k=length - len(ids))
            else:
                del words[max(1, len(words) - (len(ids) - length)) :]
                words[0] = random.choice(self._words)
        raise InvalidArgument(
            f"--n-input-tokens={self._input}: no prompt of {length} tokens can be made with this"
            " tokenizer"
        )

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=False)
