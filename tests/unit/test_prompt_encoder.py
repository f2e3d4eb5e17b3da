"""Prompt encoder: long prompts are refused early, and those that fit are encoded as a whole."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from cog_triton.engines.mock import word_tokenizer
from cog_triton.errors import PromptTooLong
from cog_triton.text import prompt_encoder
from cog_triton.text.prompt_encoder import PromptEncoder
from cog_triton.text.tokenizer import EngineTokenizer


def unigram() -> Tokenizer:
    """T5 shaped: runs of unknown characters are one token."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("he", -2.0), ("l", -3.0), ("o", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT shaped: spaces are dropped, and a long word is one unknown token."""
    vocabulary = {"[UNK]": 0, "he": 1, "##l": 2, "##o": 3, "h": 4}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def self_merging() -> Tokenizer:
    """Runs of one character merge into tokens of 2, 4, ... 64: nothing shows where to cut."""
    tokenizer = byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a" * 64 + " " + "ab" * 32] * 9, trainer)
    return tokenizer


TOKENIZERS = {
    "byte level": EngineTokenizer(byte_level(), bos_token="<|im_start|>"),
    "byte fallback": EngineTokenizer(byte_fallback(), bos_token="<s>"),
    "mock": EngineTokenizer(word_tokenizer.make()),
    "unigram": EngineTokenizer(unigram()),
    "word piece": EngineTokenizer(word_piece()),
    "self merging": EngineTokenizer(self_merging()),
}
WORDS = ["hello ", "a", "ab", " ", "the quick ", "日本", "é", "\n"]
WORDS += ["<s>", "<|im_start|>", "<tool> ü"]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_encoder, "WHOLE_BYTES", 64)
    monkeypatch.setattr(prompt_encoder, "PIECE_CHARS", 256)
    monkeypatch.setattr(prompt_encoder, "_CUT_TOKENS", 8)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.usefixtures("small_pieces")
@given(parts=st.lists(st.tuples(st.sampled_from(WORDS), st.integers(1, 300)), max_size=12))
def test_a_prompt_that_fits_is_encoded_as_a_whole(kind: str, parts: list[tuple[str, int]]) -> None:
    tokenizer = TOKENIZERS[kind]
    text = "".join(word * count for word, count in parts)
    ids = tokenizer.encode(text)
    assert PromptEncoder(tokenizer, len(ids)).encode(text) == ids


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.usefixtures("small_pieces")
@given(text=st.text(min_size=300) | st.text("ab \n", min_size=300))
def test_any_text_that_fits_is_encoded_as_a_whole(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert PromptEncoder(tokenizer, len(ids)).encode(text) == ids
    assert PromptEncoder(tokenizer, None).encode(text) == ids


class CountingTokenizer:
    """Counts the characters that are encoded, and how many texts at once."""

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        self.tokenizer = tokenizer.tokenizer
        self.bos_token = tokenizer.bos_token
        self.token_id = tokenizer.token_id
        self._encode = tokenizer.encode
        self._lock = threading.Lock()
        self._running = 0
        self.encoded: list[int] = []
        self.most_at_once = 0

    def encode(self, text: str, **options: Any) -> list[int]:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self.encoded.append(len(text))
        try:
            return self._encode(text, **options)
        finally:
            with self._lock:
                self._running -= 1


@pytest.mark.parametrize("word", ["a", "hello ", "<|im_start|>"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_long_prompt_is_refused_after_few_pieces(kind: str, word: str) -> None:
    tokenizer = CountingTokenizer(TOKENIZERS[kind])
    text = word * (10_000_000 // len(word.encode()))
    few = len(TOKENIZERS[kind].encode(text[:100_000])) < 1000
    encoder = PromptEncoder(tokenizer, 2047)  # type: ignore[arg-type]
    if few:  # it may fit
        text = text[:200_000]
        assert encoder.encode(text) == TOKENIZERS[kind].encode(text)
        return
    with pytest.raises(PromptTooLong) as caught:
        encoder.encode(text)
    assert "2047" in caught.value.detail
    assert sum(tokenizer.encoded) <= 40 * prompt_encoder.PIECE_CHARS


def test_few_long_prompts_are_encoded_at_a_time_and_short_ones_do_not_wait() -> None:
    tokenizer = CountingTokenizer(TOKENIZERS["mock"])
    encoder = PromptEncoder(tokenizer, 10**9)  # type: ignore[arg-type]
    encoder._limit = 100_000
    text = "tell me " * 50_000
    threads = [threading.Thread(target=encoder.encode, args=[text]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.most_at_once <= 2
    assert tokenizer.encoded.count(len(text)) == 8
    with encoder._turns, encoder._turns:
        assert encoder.encode("short") == TOKENIZERS["mock"].encode("short")


MEMORY = """
import resource, sys
from cog_triton.engines.mock import word_tokenizer
from cog_triton.errors import PromptTooLong
from cog_triton.text.prompt_encoder import PromptEncoder
from cog_triton.text.tokenizer import EngineTokenizer
encoder = PromptEncoder(EngineTokenizer(word_tokenizer.make()), 131072)
text = sys.argv[1] * (10_000_000 // len(sys.argv[1].encode()))
encoder.encode("warm " * 20_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    encoder.encode(text)
except PromptTooLong as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


def test_refusing_a_prompt_takes_less_memory_than_three_times_its_bytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, "日本語"], capture_output=True, text=True, check=True
    )
    grown, _, error = done.stdout.partition(" ")
    assert "E1002 PromptTooLong" in error
    assert int(grown) * 1024 < 3 * 10_000_000
