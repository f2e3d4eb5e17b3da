"""Two small tokenizers of the two kinds there are, and how to put one on disk."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = ["the quick brown fox jumps over the lazy dog", "don't stop", "größer als 日本語", "\n\n  x"]


def byte_level() -> Tokenizer:
    """GPT-2 shaped: all 256 bytes are tokens, so any character may be cut anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool> ü", normalized=False)])
    return tokenizer


def byte_fallback(*, bos: bool = True) -> Tokenizer:
    """Llama 2 shaped: pieces with U+2581 for the space, `<0x..>` for bytes, BOS put in front."""
    specials = ["<unk>", "<s>", "</s>"]
    pieces = ["▁", *"helowrdÄ日!", "\ufffd"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁", "w"), ("▁", "▁"), ("▁he", "ll")]
    merged = [left + right for left, right in merges]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *merged]
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def save(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Write the directory that `EngineTokenizer.load` reads; returns it."""
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
