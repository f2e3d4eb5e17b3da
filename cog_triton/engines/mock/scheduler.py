"""All streams of the mock on one clock: what is due, in order, and how long there is to wait."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Set

from cog_triton.engines.mock.mock_directory import MockModel
from cog_triton.engines.mock.mock_options import MockOptions
from cog_triton.engines.mock.mock_request import MockRequest
from cog_triton.engines.mock.planned_output import Output, plan
from cog_triton.engines.mock.token_schedule import Timetable
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import InvalidArgument, PromptTooLong, TritonUnknownError

_REFUSED = {"bad_words": "bad_words_list", "guide": "guided_decoding_guide"}


class _Stream:
    """A request in its slot: `made` of its tokens, `sent` of them; the next leave at `due`."""

    __slots__ = ("due", "group", "handle", "live", "log_probs", "made", "output", "sent", "times")

    def __init__(
        self, handle: int, request: MockRequest, output: Output, times: Timetable, group: int
    ) -> None:
        self.handle = handle
        self.output = output
        self.times = times
        self.group = group
        self.log_probs = request.return_log_probs
        self.made = self.sent = 0
        self.live = True
        self.due = times.due(min(group, output.steps))

    def make(self, now: float, join: bool) -> None:
        """Make one group of tokens; and to `join`, all others that are due by a rate."""
        steps, group = self.output.steps, self.group
        while True:
            self.made = made = min(self.made + group, steps)
            if made == steps:
                return
            due = self.times.due(min(made + group, steps))
            flat_out, self.due = due == self.due, due
            if not join or flat_out or due > now:
                return


class Scheduler:
    """Knows no threads; `clock` gives seconds. `inject` is called to do a crash or a hang."""

    def __init__(
        self,
        model: MockModel,
        options: MockOptions,
        inject: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._options = options
        self._inject = inject
        self._clock = clock
        self._end_ids = frozenset(model.eos_ids)
        self._slots: dict[int, _Stream] = {}
        self._line: dict[int, tuple[MockRequest, Output]] = {}
        self._order = itertools.count()
        self._heap: list[tuple[float, int, _Stream]] = []

    @property
    def waiting(self) -> int:
        """Requests that found no slot yet."""
        return len(self._line)

    def submit(self, handle: int, request: MockRequest) -> None:
        """Add a request; raises E1002 or E1005 when it cannot be served."""
        self._check(request)
        output = plan(request, self._model.output_ids, self._ends(request))
        self._line[handle] = request, output
        self._admit()

    def cancel(self, handle: int) -> bool:
        """Forget a request; whether there was one."""
        stream = self._slots.pop(handle, None)
        if stream is not None:
            stream.live = False
            self._admit()
            return True
        return self._line.pop(handle, None) is not None

    def next_due(self) -> float | None:
        """The time at which `due` has something next; None while there is nothing to do."""
        heap = self._heap
        while heap and not heap[0][2].live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self) -> Iterator[tuple[int, TokenEvent]]:
        """One event for each stream that has tokens due, and the events of those that end.

        Time goes on while a caller sends them: each event has what is due when it is taken, or
        without `MockOptions.join` one group of it.
        """
        now, heap = self._clock(), self._heap
        ready: deque[_Stream] = deque()
        while heap and heap[0][0] <= now:
            ready.append(heapq.heappop(heap)[2])
        for stream in ready:
            if stream.live:
                stream.make(self._clock(), self._options.join)
                yield from self._events(stream)
                if stream.live:
                    self._queue(stream)

    def _events(self, stream: _Stream) -> Iterator[tuple[int, TokenEvent]]:
        output = stream.output
        ids = self._ids(stream.sent, min(stream.made, output.tokens))
        stream.sent += len(ids)
        log_probs = [0.0] * len(ids) if stream.log_probs else []
        if stream.made < output.steps:
            if ids:  # none while a stop word is made
                yield stream.handle, TokenEvent(ids, log_probs)
            return
        if output.end in ("stop", "length"):
            self._leave(stream)
            yield stream.handle, TokenEvent(ids, log_probs, output.end)
            return
        if ids:
            yield stream.handle, TokenEvent(ids, log_probs)
        if output.end == "error":
            self._leave(stream)
            error = TritonUnknownError(f"inject=error: as asked, after {output.tokens} tokens")
            yield stream.handle, TokenEvent([], [], error=error)
        else:
            self._inject(output.end)

    def _ids(self, start: int, end: int) -> list[int]:
        passage = self._model.output_ids
        size = len(passage)
        first = start % size
        if first + end - start <= size:
            return passage[first : first + end - start]
        return [passage[place % size] for place in range(start, end)]

    def _leave(self, stream: _Stream) -> None:
        stream.live = False
        del self._slots[stream.handle]
        self._admit()

    def _admit(self) -> None:
        while self._line and len(self._slots) < self._options.max_batch_size:
            handle = next(iter(self._line))
            request, output = self._line.pop(handle)
            options = self._options
            prefill = _own(request.prefill_ms, options.prefill_ms) * len(request.input_ids) / 1000
            times = Timetable(
                self._clock() + prefill,
                _own(request.tps, options.tps),
                _own(request.jitter, options.jitter),
                request.sampling.seed,
            )
            group = request.tokens_per_response or options.tokens_per_response
            stream = self._slots[handle] = _Stream(handle, request, output, times, group)
            self._queue(stream)

    def _queue(self, stream: _Stream) -> None:
        heapq.heappush(self._heap, (stream.due, next(self._order), stream))

    def _ends(self, request: MockRequest) -> Set[int]:
        if request.end_id is None:
            return self._end_ids
        return frozenset([request.end_id] if request.end_id >= 0 else [])

    def _check(self, request: MockRequest) -> None:
        size, model = len(request.input_ids), self._model
        if not size:
            raise InvalidArgument("input_ids: empty; at least one token is required")
        low, high = min(request.input_ids), max(request.input_ids)
        if low < 0 or high >= model.vocab_size:
            raise InvalidArgument(
                f"input_ids: holds {low if low < 0 else high}; must be from 0 to"
                f" {model.vocab_size - 1}, the model's vocabulary"
            )
        if size + request.sampling.max_tokens > model.max_seq_len:
            raise PromptTooLong(
                f"Prompt length ({size}) and request_output_len ({request.sampling.max_tokens})"
                f" exceed maximum sequence length ({model.max_seq_len})"
            )
        for attribute, name in _REFUSED.items():
            if getattr(request, attribute):
                raise InvalidArgument(f"{name}: this engine does not support {name}")


def _own(value: float | None, default: float) -> float:
    return default if value is None else value
