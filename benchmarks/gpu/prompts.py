"""Random prompts of an exact number of tokens, as text and as ids; no two share a prefix."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

# Ids from here on are padding words of the tokenizer, which no text is encoded to.
_PLAIN = 49152


@dataclass(frozen=True)
class Prompt:
    """One prompt, as text and as token ids."""

    text: str
    ids: list[int]


def make(tokenizer_dir: Path, count: int, length: int, seed: int = 7) -> list[Prompt]:
    """Make `count` prompts of `length` tokens: random words, each of them one token.

    Raises ValueError if the tokenizer does not give just these tokens for the text.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    words = {
        token: number
        for token, number in tokenizer.get_vocab().items()
        if number < _PLAIN and token[0] == "\u0120" and token[1:].isascii() and token[1:].isalpha()
    }
    ordered = sorted(words.items())
    chosen = random.Random(seed)
    made = []
    for _ in range(count):
        picked = chosen.choices(ordered, k=length)
        text = "".join(f" {token[1:]}" for token, _ in picked)
        made.append(Prompt(text, [number for _, number in picked]))
        if tokenizer.encode(text).ids != made[-1].ids:
            raise ValueError(f"{tokenizer_dir}: does not encode {text[:60]!r}... word by word")
    return made
