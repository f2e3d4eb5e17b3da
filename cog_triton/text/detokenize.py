"""Incremental detokenizer: token ids in, text out, one chunk at a time.

`Detokenizer` gives exactly the text that decoding all ids at once would give, without ever
decoding them again. Characters may span tokens, in a way that depends on the kind of tokenizer:

- byte-level BPE (GPT-2, Llama 3, Qwen): a token is any run of bytes, so the bytes go through an
  incremental UTF-8 decoder;
- byte fallback (Llama 2, Mistral, Gemma): only tokens named `<0xE2>` are bytes, and one bad byte
  spoils its whole run, so a run is held back until it ends.

Whether a character is complete is never guessed from U+FFFD in the text, so a U+FFFD that the
model generates is released at once.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

TokenText = Callable[[int], bytes]
"""`token_bytes` of one tokenizer."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Vocabulary:
    """Tokens of a tokenizer as they were looked up, for all streams with the same `visible` ones.

    Special tokens are hidden unless they are `visible`.
    """

    def __init__(self, tokenizer: Any, visible: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.shows_special = bool(visible)
        self.of_bytes = type(tokenizer.decoder).__name__ == "ByteLevel"
        self.raw: dict[int, bytes] = {}
        """Bytes of tokens of byte-level BPE."""
        self.whole: dict[int, str] = {}
        """Text of those of them that begin and end between characters."""
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = {
            token_id
            for token_id, token in added.items()
            if token.special and token.content not in visible
        }

    def look_up(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None if it is hidden, or there is no such id."""
        token: str | None = self.tokenizer.id_to_token(token_id)
        return None if token_id in self._hidden else token

    def learn(self, token_id: int) -> None:
        """Look up a token of byte-level BPE."""
        token = self.look_up(token_id)
        raw = self.raw[token_id] = b"" if token is None else _spelled(token)
        with suppress(UnicodeDecodeError):
            self.whole[token_id] = raw.decode()


class Detokenizer(ABC):
    """Incremental decoder of one stream of token ids; special ones are left out unless visible.

    ``"".join(feed(ids) ...) + flush()`` equals ``tokenizer.decode(all_ids,
    skip_special_tokens=True)`` however the ids are cut into chunks. The cost of a token does not
    depend on how many came before it.
    """

    @staticmethod
    def by(vocabulary: Vocabulary) -> Detokenizer:
        """The kind for a vocabulary, which all streams of its tokenizer may share."""
        return (_ByteLevelDetokenizer if vocabulary.of_bytes else _WindowDetokenizer)(vocabulary)

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary) -> None: ...

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> str:
        """Text that these ids complete; ``""`` while a character is incomplete."""

    @abstractmethod
    def flush(self) -> str:
        """Text that was held back; call once, after the last id."""


class _ByteLevelDetokenizer(Detokenizer):
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._whole = vocabulary.whole
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._amid_character = False

    def feed(self, ids: Sequence[int]) -> str:
        if not self._amid_character:
            try:
                return "".join([self._whole[token_id] for token_id in ids])
            except KeyError:  # a token that is new, or of a character's part
                pass
        known = self._vocabulary.raw
        for token_id in ids:
            if token_id not in known:
                self._vocabulary.learn(token_id)
        text = self._decoder.decode(b"".join([known[token_id] for token_id in ids]))
        self._amid_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer(Detokenizer):
    """Decodes pending ids together with the one visible id before them, as context."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._look_up = vocabulary.look_up
        # Of special tokens, only visible ones are among the ids.
        skip = not vocabulary.shows_special
        self._decode = partial(vocabulary.tokenizer.decode, skip_special_tokens=skip)
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        complete = 0
        for token_id in ids:
            token = self._look_up(token_id)
            if token is not None:
                self._pending.append(token_id)
                if not _BYTE_TOKEN.fullmatch(token):
                    complete = len(self._pending)
        return self._release(complete)

    def flush(self) -> str:
        return self._release(len(self._pending))

    def _release(self, count: int) -> str:
        if not count:
            return ""
        window = self._context + self._pending[:count]
        skip = len(self._decode(self._context)) if self._context else 0
        self._context, self._pending = window[-1:], self._pending[count:]
        text: str = self._decode(window)
        return text[skip:]


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Bytes of a token inside a text; they need not be whole characters.

    A leading space is included. A special token gives its name, an unknown id nothing.
    """
    token: str | None = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    if type(tokenizer.decoder).__name__ == "ByteLevel":
        return _spelled(token)
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    once: str = tokenizer.decode([token_id])
    twice: str = tokenizer.decode([token_id, token_id])  # decoders strip the first space only
    return (twice[len(once) :] or token).encode()


def _spelled(token: str) -> bytes:
    """Bytes of a byte-level BPE token."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:  # an added token is plain text, not spelled in the byte alphabet
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte alphabet of byte-level BPE (GPT-2): printable Latin-1 as itself, the rest from U+0100.

    The 188 printable ones are `!`..`~`, U+00A1..U+00AC and U+00AE..U+00FF; the other 68 bytes, in
    order, are the code points from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""The byte that a character of byte-level BPE stands for."""
