"""Text of a generation, for a thread to iterate."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from queue import SimpleQueue

from cog_triton.engines.step_items import StepItem
from cog_triton.serving.generate import Generation, TextGenerator
from cog_triton.serving.generation import GenerationRequest


class ThreadInbox:
    """Gives all that has come, as the inbox of an event loop does."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[StepItem | None] = SimpleQueue()
        self.put = self._queue.put

    def take(self) -> list[StepItem]:
        items = [self._queue.get()]
        while not self._queue.empty():
            items.append(self._queue.get())
        return [item for item in items if item is not None]


class Texts(Iterator[str]):
    """Begins with the first `next`; `close` leaves as a client does."""

    def __init__(self, generator: TextGenerator, request: GenerationRequest) -> None:
        self._inbox = ThreadInbox()
        self.generation = Generation(generator, request, self._inbox)
        self._texts = self._read()
        self.close = self._texts.close

    def __next__(self) -> str:
        return next(self._texts)

    def _read(self) -> Generator[str, None, None]:
        with self.generation as generation:
            while not generation.ended:
                piece = generation.advance(self._inbox.take())
                if piece is not None and piece.text:
                    yield piece.text
