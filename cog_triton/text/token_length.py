"""Longest token of a tokenizer, in bytes of the prompt: how few tokens a text can have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

# Most bytes that each normalizer makes one byte of; others may drop text without a bound.
_SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 8, "NFKD": 8, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
_KEEP_ALL_TEXT = ("ByteLevel", "Metaspace", "Digits")


def max_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Most UTF-8 bytes of a prompt that one token can stand for; None if that is not bounded.

    It is not where text is dropped, joined to one unknown token, or taken in by a special token
    that strips the space around it.
    """
    model, added = tokenizer.model, list(tokenizer.get_added_tokens_decoder().values())
    if not isinstance(model, models.BPE) or any(token.lstrip or token.rstrip for token in added):
        return None
    shrinks = 1
    for part in _parts(tokenizer.normalizer, "normalizers"):
        factor = _shrinks(part)
        if factor is None:
            return None
        shrinks *= factor
    splits = list(_parts(tokenizer.pre_tokenizer, "pretokenizers"))
    if not all(map(_keeps_all_text, splits)):
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    if any(part["type"] == "ByteLevel" for part in splits):
        if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
            return None
        longest = max(map(len, vocabulary))  # a character stands for a byte
    elif model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        longest = max(len(token.encode()) for token in vocabulary)
    else:
        return None
    return shrinks * max([longest, *(len(token.content.encode()) for token in added)])


def _parts(component: Any, members: str) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as tokenizer.json describes them."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending += part[members]
        else:
            yield part


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        longer = pattern and len(normalizer["content"].encode()) >= len(pattern.encode())
        return 1 if longer else None
    return _SHRINKS.get(normalizer["type"])


def _keeps_all_text(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEP_ALL_TEXT
