"""Tokenizer of the mock engine: one token for each word of a short list, else one for each byte."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cog_triton.engines.mock.canned_text import PASSAGE, WORDS

_OPENING, END = "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": END,
    "chat_template": _CHAT_TEMPLATE,
}
"""Content of tokenizer_config.json."""


def make() -> Tokenizer:
    """Make a byte-level BPE as GPT-2's, without merges: known words are one token, others bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = dict.fromkeys([_OPENING, END, *alphabet, *_spelled_words()])
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_OPENING, END])
    return tokenizer


def _spelled_words() -> list[str]:
    """Every word in the byte alphabet, with and without a capital and a space before it."""
    told = filter(str.isascii, re.findall(r"\w+", PASSAGE))
    words = sorted({*WORDS.split(), *told})
    cases = dict.fromkeys(form for word in words for form in (word, word.capitalize()))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    return [split(space + word)[0][0] for word in cases for space in ("", " ")]
