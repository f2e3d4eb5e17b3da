"""Text that the mock is known to say, and a check of streams against it as they arrive."""

from __future__ import annotations

import bisect
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from cog_triton import errors
from cog_triton.engines.mock import mock_directory
from cog_triton.text.sse import EventSplitter, event_data
from cog_triton.text.tokenizer import EngineTokenizer

LOST, DOUBLED, DISORDERED = "lost", "doubled", "out of order or another stream's"
SURPLUS, SHORT, UNCODED = "beyond the end", "ended early without an error", "failed without a code"
MISCOUNTED = "other number of tokens told"
WRONG = (LOST, DOUBLED, DISORDERED, SURPLUS, SHORT, UNCODED, MISCOUNTED)
COMPLETE = "complete"
_LOOKED_AT = 48
"""Characters that tell where in the passage a stream goes on."""


class KnownText:
    """First `n` tokens of the mock's text, which is one passage without end."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            engine = mock_directory.make_engine(Path(directory))
            ids = mock_directory.read_model(engine).output_ids
            decode = EngineTokenizer.load(engine).tokenizer.decode
        self._heads = [str(decode(ids[:count])) for count in range(len(ids))]
        self.passage = str(decode(ids))
        self._whole = [len(head.rstrip("\N{REPLACEMENT CHARACTER}")) for head in self._heads]

    def __call__(self, tokens: int) -> str:
        """Text of so many tokens, without a character that has not ended."""
        passages, rest = divmod(tokens, len(self._heads))
        return self.passage * passages + self._heads[rest][: self._whole[rest]]

    def tokens(self, characters: int) -> int:
        """Number of tokens that made so many characters, at least."""
        passages, rest = divmod(characters, len(self.passage))
        return passages * len(self._heads) + bisect.bisect_left(self._whole, rest)


class KnownStream:
    """Check of one streamed answer (`ResponseSink`): what arrives has to be the known text.

    After the first piece that is not, nothing more is checked; `outcome` then tells what it was.
    """

    path: ClassVar[str]

    def __init__(self, known: KnownText, tokens: int) -> None:
        self.known = known
        self.tokens = tokens
        self.position = 0
        self.error: str | None = None
        self.told: int | None = None
        self._text = known(tokens)
        self.astray = ""
        self._splitter = EventSplitter()
        self._status = 0

    def request(self, **values: Any) -> dict[str, Any]:
        """The body to send."""
        raise NotImplementedError

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event's data."""
        raise NotImplementedError

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `ResponseSink.begin`."""
        self._status = status
        if status != 200:
            self.error = ""

    def body(self, data: bytes, at: float) -> None:
        """See `ResponseSink.body`."""
        if self._status != 200:
            self.error = (self.error or "") + data.decode("utf-8", "replace")
            return
        for event in self._splitter.feed(data):
            payload = event_data(event)
            if payload and payload != b"[DONE]":
                self.take(json.loads(payload))

    def text(self, piece: str) -> None:
        """Compare a piece of output with what is next."""
        if not self.astray and self._text.startswith(piece, self.position):
            self.position += len(piece)
        elif len(self.astray) < _LOOKED_AT:
            self.astray += piece

    @property
    def checked(self) -> int:
        """Tokens that arrived as they should."""
        whole = self.position == len(self._text)
        return self.tokens if whole else self.known.tokens(self.position)

    @property
    def wrong(self) -> str | None:
        """Which of WRONG its text was, None if all of it was right so far."""
        if not self.astray:
            return None
        passage = self.known.passage
        start = self.position % len(passage)
        ahead = (passage * 3).find(self.astray[:_LOOKED_AT], start) - start
        if ahead < 0:
            return DISORDERED
        if ahead == 0:
            return SURPLUS
        return LOST if ahead <= len(passage) / 2 else DOUBLED

    @property
    def outcome(self) -> str:
        """COMPLETE, one of WRONG, or the code of the error that it ended with."""
        if self.wrong:
            return self.wrong
        if self.error is not None:
            error = errors.from_text(self.error)
            return error.code if error else UNCODED
        if self.position < len(self._text) or self.told is None:
            return SHORT
        return COMPLETE if self.told == self.tokens else MISCOUNTED


class KnownPrediction(KnownStream):
    """Stream of Cog's /predictions."""

    path = "/predictions"

    def __init__(self, known: KnownText, tokens: int) -> None:
        super().__init__(known, tokens)
        self._pieces = 0

    def request(self, **values: Any) -> dict[str, Any]:
        """See `KnownStream.request`."""
        return {"input": {"max_tokens": self.tokens, **values}}

    def take(self, event: Mapping[str, Any]) -> None:
        """See `KnownStream.take`; pieces are numbered."""
        if "chunk" in event:
            in_turn = event["index"] == self._pieces
            self._pieces += 1
            self.text(event["chunk"] if in_turn else f"[{event['index']}]")
        elif event.get("status") == "succeeded":
            self.told = event["metrics"]["output_token_count"]
            if "".join(event["output"]) != self._text[: self.position]:
                self.text("[output]")
        elif event.get("error"):
            self.error = str(event["error"])


class KnownCompletion(KnownStream):
    """Stream of the OpenAI API's /v1/completions."""

    path = "/v1/completions"

    def request(self, **values: Any) -> dict[str, Any]:
        """See `KnownStream.request`."""
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": "mock", "max_tokens": self.tokens, "ignore_eos": True, **usage, **values}

    def take(self, event: Mapping[str, Any]) -> None:
        """See `KnownStream.take`."""
        if event.get("error"):
            self.error = str(event["error"])
            return
        for choice in event["choices"]:
            self.text(choice["text"])
        if event.get("usage"):
            self.told = event["usage"]["completion_tokens"]
