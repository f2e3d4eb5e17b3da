"""Double of vllm/tokenizers."""

from pathlib import Path

from tokenizers import Tokenizer


def get_tokenizer(name):
    return Tokenizer.from_file(str(Path(name) / "tokenizer.json"))
