"""Step clock of the mock engine: all running sequences advance together, as an engine's batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cog_triton.engines.mock.mock_directory import MockModel
from cog_triton.engines.mock.mock_options import MockOptions
from cog_triton.engines.mock.scheduler import Scheduler, Stream
from cog_triton.engines.request import TokenEvent

_MAX_LATE_S = 0.25
"""Most time that late steps make up for."""


class StepClock(Scheduler):
    """Scheduler with one clock: a step every `MockOptions.step_ms`, one token for each sequence.

    A sequence joins at the first step after its prefill. `tps` and `jitter` mean nothing here.
    """

    def __init__(
        self,
        model: MockModel,
        options: MockOptions,
        inject: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(model, options, inject, clock)
        self._interval = options.step_ms / 1000
        self._prefilling: list[Stream] = []
        self._batch: list[Stream] = []
        self._next = 0.0
        # A step's events are alike for all sequences that are at one place of the passage.
        self._tokens = [TokenEvent([token], []) for token in model.output_ids]

    def next_due(self) -> float | None:
        """See `Scheduler.next_due`."""
        return self._next if self._batch or self._prefilling else None

    def due(self) -> Iterator[tuple[int, TokenEvent]]:
        """One step if it is due: an event for each sequence that made a token."""
        now = self._clock()
        if now < self._next:
            return
        self._next = max(self._next + self._interval, now - _MAX_LATE_S)
        if self._prefilling:
            self._join(now)
        tokens, size = self._tokens, len(self._tokens)
        batch, self._batch = self._batch, []
        stays = self._batch.append
        for stream in batch:
            if not stream.live:
                continue
            made = stream.made
            if stream.plain and made + 1 < stream.sendable:
                stream.made = stream.sent = made + 1
                yield stream.handle, tokens[made % size]
            else:
                stream.made = min(made + stream.group, stream.output.steps)
                yield from self._events(stream)
            if stream.live:
                stays(stream)

    def _schedule(self, stream: Stream) -> None:
        if not (self._batch or self._prefilling):
            self._next = max(self._next, self._clock() + self._interval)
        self._prefilling.append(stream)

    def _join(self, now: float) -> None:
        """Put the sequences whose prefill has ended before this step into the batch."""
        waiting, self._prefilling = self._prefilling, []
        for stream in waiting:
            if stream.live:
                joins = stream.schedule.begin <= now
                (self._batch if joins else self._prefilling).append(stream)
