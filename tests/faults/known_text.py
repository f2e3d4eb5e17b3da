"""Text that the mock is known to say."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cog_triton.engines.mock import mock_directory
from cog_triton.text.tokenizer import EngineTokenizer


class KnownText:
    """First `n` tokens of the mock's text, which is one passage without end."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            engine = mock_directory.make_engine(Path(directory))
            ids = mock_directory.read_model(engine).output_ids
            decode = EngineTokenizer.load(engine).tokenizer.decode
        self._heads = [str(decode(ids[:count])) for count in range(len(ids))]
        self._passage = str(decode(ids))

    def __call__(self, tokens: int) -> str:
        """Text of so many tokens, without a character that has not ended."""
        passages, rest = divmod(tokens, len(self._heads))
        return self._passage * passages + self._heads[rest].rstrip("\N{REPLACEMENT CHARACTER}")
