"""Text of a generation, for a thread to iterate."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator

from loop_thread import call

from cog_triton.serving.generate import Generation, TextGenerator
from cog_triton.serving.generation import GenerationRequest, TextPiece
from cog_triton.serving.inbox import Inbox


async def _inbox() -> Inbox:
    return Inbox()


class Texts(Iterator[str]):
    """Begins with the first `next`; `close` leaves as a client does."""

    def __init__(self, generator: TextGenerator, request: GenerationRequest) -> None:
        self._inbox = call(_inbox)
        self.generation = Generation(generator, request, self._inbox.put)
        self._texts = self._read()
        self.close = self._texts.close

    def __next__(self) -> str:
        return next(self._texts)

    def _read(self) -> Generator[str, None, None]:
        call(self.generation.__enter__)
        try:
            while not self.generation.ended:
                piece = call(self._advance)
                if piece is not None and piece.text:
                    yield piece.text
        finally:
            call(self.generation.__exit__, *sys.exc_info())

    async def _advance(self) -> TextPiece | None:
        return self.generation.advance(await self._inbox.take() or [])
