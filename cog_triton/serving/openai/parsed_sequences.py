"""Sequences whose text goes through vLLM's parsers before it is told, in steps like the engine's.

What the engine has made is sent on at once; a piece is given when its deltas are back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Self

from cog_triton.serving.generate import TextGenerator
from cog_triton.serving.generation import TextPiece, TokenLogProb
from cog_triton.serving.openai.parsers.borrowed import BorrowedStream
from cog_triton.serving.openai.sequences import Pieces, SequencePlan, Sequences


class ParsedSequences(Sequences):
    """As `Sequences`; a piece says that a stream has something, which its parser gives."""

    def __init__(
        self,
        generator: TextGenerator,
        plan: SequencePlan,
        streams: Sequence[BorrowedStream],
        *,
        streamed: bool,
    ) -> None:
        """`streams` are of the answers' parsers, in their places.

        An answer that is not `streamed` is parsed when it is whole, as vLLM does.
        """
        super().__init__(generator, plan)
        self._streams = streams
        self._streamed = streamed
        self._texts: list[list[str]] = [[] for _ in streams]
        self._sent = [0] * len(streams)
        self._log_probs: list[list[TokenLogProb]] = [[] for _ in streams]
        self._done = [False] * len(streams)

    def __enter__(self) -> Self:
        super().__enter__()
        loop = asyncio.get_running_loop()
        for stream, request in zip(self._streams, self.plan.requests, strict=True):
            wake = partial(loop.call_soon_threadsafe, self._inbox.put, None)
            stream.begin(request.engine.input_ids, wake)
        return self

    @property
    def ended(self) -> bool:
        return not self._running and all(self._done)

    def done(self, place: int) -> bool:
        return self._done[place]

    def _advanced(self) -> Pieces:
        for place, piece in super()._advanced():
            self._send(place, piece)
        pieces: list[tuple[int, TextPiece | None]] = []
        for place, stream in enumerate(self._streams):
            if self._done[place]:
                continue
            generation = self.generations[place]
            self._done[place] = done = generation.ended and not stream.waits
            if done or stream.has_results:
                log_probs, self._log_probs[place] = self._log_probs[place], []
                count = generation.result.output_token_count
                pieces.append((place, TextPiece("", log_probs, count)))
        return pieces

    def _send(self, place: int, piece: TextPiece | None) -> None:
        """Send what is new of a sequence, were it token ids without a text yet."""
        generation, stream = self.generations[place], self._streams[place]
        text = "" if piece is None else piece.text
        if piece is not None:
            self._log_probs[place] += piece.log_probs
        if not self._streamed:
            self._texts[place].append(text)
            if generation.ended:
                stream.send_whole("".join(self._texts[place]), generation.token_ids)
            return
        ids = generation.token_ids[self._sent[place] :]
        self._sent[place] += len(ids)
        if ids or text or generation.ended:
            stream.send(text, ids, finished=generation.ended)

    def _end_running(self, error: BaseException | None) -> None:
        super()._end_running(error)
        for stream in self._streams:
            stream.close()
