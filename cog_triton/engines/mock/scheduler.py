"""Scheduler of the mock engine: batch slots, FIFO queue and due times of all streams."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.mock.mock_directory import MockModel
from cog_triton.engines.mock.mock_request import Injection, MockOptions, MockRequest
from cog_triton.engines.request import FinishReason, TokenEvent, check_prompt
from cog_triton.engines.stop_words import StopWords
from cog_triton.errors import InvalidArgument, TritonUnknownError


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """Output plan: `steps` tokens are generated, the first `tokens` of them sent.

    They are those of the passage from the place `start` on.
    """

    steps: int
    tokens: int
    end: FinishReason | Injection
    start: int = 0


def plan_output(
    request: MockRequest, passage: Sequence[int], end_ids: Set[int], context: float = math.inf
) -> PlannedOutput:
    """Plan the output of `request`; raises E1005 for an injection after the output's end.

    One that may fill the `context`, as without a limit of its own, ends with the passage.
    """
    made = len(request.made)
    after = request.inject_after - made
    request = request.as_prompt()
    output = _stopped(request, passage, end_ids)
    max_tokens = request.sampling.max_tokens
    output = output or PlannedOutput(max_tokens, max_tokens, "length")
    rest = max(len(passage) - made, request.sampling.min_tokens, 1)
    if end_ids and rest < output.steps and len(request.input_ids) + max_tokens >= context:
        output = PlannedOutput(rest, rest, "stop")
    if request.inject is None or after < 0:
        return output
    if after >= output.steps:
        raise InvalidArgument(
            f"inject_after={after}: must be less than {output.steps}, the tokens that are made"
        )
    return PlannedOutput(after + 1, min(after, output.tokens), request.inject)


def _stopped(
    request: MockRequest, passage: Sequence[int], end_ids: Set[int]
) -> PlannedOutput | None:
    """The output up to the first end id or stop word, None if there is none."""
    if end_ids.isdisjoint(passage) and not request.stop_words:
        return None
    sampling = request.sampling
    words = StopWords(request.stop_words, sampling.min_tokens)
    # One pass over the passage finds whatever there is to find.
    longest = max(map(len, request.stop_words), default=0)
    for place in range(min(sampling.max_tokens, sampling.min_tokens + len(passage) + longest)):
        token = passage[place % len(passage)]
        if token in end_ids and place >= sampling.min_tokens:
            return PlannedOutput(place + 1, place, "stop")
        if words.add(token, 0.0):
            return PlannedOutput(place + 1, len(words.rest()), "stop")
    return None


_STEP = 2654435761  # neighbouring seeds are far apart in the table
_SIZE = 4096
_random = random.Random(0)
_OFFSETS = [_random.random() - 0.5 for _ in range(_SIZE)]


class TokenSchedule:
    """Due times: token k, from 1 on, at ``begin + k / tps`` seconds, however late others were.

    With a `jitter` up to 1 it is due up to half of that part of 1 / `tps` earlier or later, the
    same for the same `seed`; never before the one ahead of it. A `tps` of 0 has all due at once.
    `begin` is when prefill ends.
    """

    __slots__ = ("_interval", "_jitter", "_seed", "begin")

    def __init__(self, begin: float, tps: float, jitter: float = 0.0, seed: int = 0) -> None:
        self.begin = begin
        self._interval = 1 / tps if tps else 0.0
        self._jitter = jitter
        self._seed = seed * _STEP

    def due(self, token: int) -> float:
        """Due time of a token, in seconds of the scheduler's clock."""
        if self._jitter:
            offset = _OFFSETS[(self._seed + token) % _SIZE]
            return self.begin + (token + self._jitter * offset) * self._interval
        return self.begin + token * self._interval


_OF_PROMPT = -1.0


def top_log_probs(ids: Sequence[int], top: int, vocab_size: int) -> tuple[list[float], list[int]]:
    """Log probabilities of generated tokens, and the ids of the `top` likeliest beside each.

    Each token is the likeliest, with 0.0; those with the next ids follow.
    """
    values = [0.0, *(-float(place) for place in range(top))]
    others = [(token + place) % vocab_size for token in ids for place in range(top)]
    return values * len(ids), others


def prompt_event(ids: Sequence[int], top: int, vocab_size: int) -> TokenEvent:
    """The event of the prompt's tokens; each is as likely as the next ones are less."""
    values, others = top_log_probs(ids, top, vocab_size)
    shifted = [value + _OF_PROMPT for value in values]
    return TokenEvent(list(ids), shifted, alternatives=others, of_prompt=True)


_BLOCK_SIZE, _BLOCKS_PER_SLOT = 32, 64
_UNSUPPORTED = {"bad_words": "bad_words_list", "guide": "guided_decoding_guide"}


class Stream:
    """A request in a batch slot: `made` and `sent` count its tokens; the next leave at `due`."""

    def __init__(
        self,
        handle: int,
        request: MockRequest,
        output: PlannedOutput,
        schedule: TokenSchedule,
        group: int,
        passage: list[int],
    ) -> None:
        self.handle = handle
        self.prompt_tokens = len(request.input_ids)
        self.output = output
        self.passage = passage
        self.schedule = schedule
        self.group = group
        self.log_probs = request.return_log_probs
        self.top = request.top_log_probs
        self.prompt = request.echoed
        self.plain = group == 1 and not self.log_probs and not output.start
        self.sendable = min(output.tokens, output.steps)
        self.made = self.sent = 0
        self.live = True
        self.due = schedule.due(min(group, output.steps))

    def make(self, now: float, join: bool) -> None:
        """Make one group of tokens; with `join` also all later groups that are due."""
        steps, group = self.output.steps, self.group
        while True:
            self.made = made = min(self.made + group, steps)
            if made == steps:
                return
            due = self.schedule.due(min(made + group, steps))
            flat_out, self.due = due == self.due, due
            if not join or flat_out or due > now:
                return


class Scheduler:
    """Thread-free scheduler: `clock` gives seconds; `inject` is called for a crash or a hang."""

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
        self._slots: dict[int, Stream] = {}
        self._queued: dict[int, tuple[MockRequest, PlannedOutput, list[int]]] = {}
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Stream]] = []

    def kv_cache(self) -> KVCacheStats:
        """KV cache of 2048 tokens a slot: a stream uses the blocks of its prompt and its tokens.

        No stream waits for blocks, and none are reused.
        """
        blocks = self._options.max_batch_size * _BLOCKS_PER_SLOT
        used = sum(
            math.ceil((stream.prompt_tokens + stream.made) / _BLOCK_SIZE)
            for stream in self._slots.values()
        )
        return KVCacheStats(min(1.0, used / blocks), _BLOCK_SIZE, blocks)

    def submit(self, handle: int, request: MockRequest, start: int = 0) -> None:
        """Add a request, whose text begins at the place `start` of the passage.

        Raises E1002 or E1005 when it cannot be served.
        """
        self._check(request)
        passage = self._passage(request)
        start %= len(passage)
        turned = passage[start:] + passage[:start] if start else passage
        end_ids, context = request.end_ids(self._end_ids), self._model.max_seq_len
        output = plan_output(request, turned, end_ids, context)
        output = replace(output, start=start) if start else output
        self._queued[handle] = request.as_prompt(), output, passage
        self._admit()

    def cancel(self, handle: int) -> bool:
        """Remove a request; returns whether there was one."""
        stream = self._slots.pop(handle, None)
        if stream is not None:
            stream.live = False
            self._admit()
            return True
        return self._queued.pop(handle, None) is not None

    def next_due(self) -> float | None:
        """Time of the next event from `due`; None while nothing is scheduled."""
        heap = self._heap
        while heap and not heap[0][2].live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self) -> Iterator[tuple[int, TokenEvent]]:
        """One event for each stream with tokens due, besides the last events of those that end.

        Time passes while the caller sends them: each event has all tokens due when it is taken,
        or without `MockOptions.join` one group of them.
        """
        now, heap = self._clock(), self._heap
        ready: deque[Stream] = deque()
        while heap and heap[0][0] <= now:
            ready.append(heapq.heappop(heap)[2])
        for stream in ready:
            if stream.live:
                stream.make(self._clock(), self._options.join)
                yield from self._events(stream)
                if stream.live:
                    self._schedule(stream)

    def _events(self, stream: Stream) -> Iterator[tuple[int, TokenEvent]]:
        output = stream.output
        start = output.start
        end = start + min(stream.made, output.tokens)
        ids = _around(stream.passage, start + stream.sent, end)
        stream.sent += len(ids)
        log_probs = [0.0] * len(ids) if stream.log_probs else []
        others: list[int] = []
        if stream.prompt:
            prompt, stream.prompt = stream.prompt, ()
            yield stream.handle, prompt_event(prompt, stream.top, self._model.vocab_size)
        if stream.top:
            log_probs, others = top_log_probs(ids, stream.top, self._model.vocab_size)
        if stream.made < output.steps:
            if ids:  # none while a stop word is made
                yield stream.handle, TokenEvent(ids, log_probs, alternatives=others)
            return
        if output.end in ("stop", "length"):
            self._free_slot(stream)
            yield stream.handle, TokenEvent(ids, log_probs, output.end, alternatives=others)
            return
        if ids:
            yield stream.handle, TokenEvent(ids, log_probs, alternatives=others)
        if output.end == "error":
            self._free_slot(stream)
            error = TritonUnknownError(f"inject=error: as asked, after {output.tokens} tokens")
            yield stream.handle, TokenEvent([], [], error=error)
        else:
            self._inject(output.end)

    def _passage(self, request: MockRequest) -> list[int]:
        """The tokens that the output goes round in: of the model's, or else of those allowed."""
        passage = self._model.output_for(request.input_ids)
        allowed = request.sampling.allowed_token_ids
        if not allowed:
            return passage
        kept = frozenset(allowed)
        return [token for token in passage if token in kept] or list(allowed)

    def _free_slot(self, stream: Stream) -> None:
        stream.live = False
        del self._slots[stream.handle]
        self._admit()

    def _admit(self) -> None:
        while self._queued and len(self._slots) < self._options.max_batch_size:
            handle = next(iter(self._queued))
            request, output, passage = self._queued.pop(handle)
            options = self._options
            token_ms = _or_default(request.prefill_ms, options.prefill_ms)
            schedule = TokenSchedule(
                self._clock() + token_ms * len(request.input_ids) / 1000,
                _or_default(request.tps, options.tps),
                _or_default(request.jitter, options.jitter),
                request.sampling.seed,
            )
            group = request.tokens_per_response or options.tokens_per_response
            stream = self._slots[handle] = Stream(handle, request, output, schedule, group, passage)
            stream.plain &= passage is self._model.output_ids
            self._schedule(stream)

    def _schedule(self, stream: Stream) -> None:
        heapq.heappush(self._heap, (stream.due, next(self._order), stream))

    def _check(self, request: MockRequest) -> None:
        model = self._model
        check_prompt(request, max_seq_len=model.max_seq_len, vocab_size=model.vocab_size)
        for attribute, name in _UNSUPPORTED.items():
            if getattr(request, attribute) and not (attribute == "guide" and model.answers):
                raise InvalidArgument(f"{name}: this engine does not support {name}")


def _around(passage: list[int], start: int, end: int) -> list[int]:
    size = len(passage)
    first = start % size
    if first + end - start <= size:
        return passage[first : first + end - start]
    return [passage[place % size] for place in range(start, end)]


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


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
