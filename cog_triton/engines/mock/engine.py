"""Mock engine: batch slots, a queue, and the tokens that are due; run by the engine process."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry
from cog_triton.engines.base import options_of
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.mock.mock_directory import MockModel, read_model
from cog_triton.engines.mock.mock_request import Injection, MockOptions, MockRequest
from cog_triton.engines.request import FinishReason, TokenEvent, check_prompt
from cog_triton.engines.stop_words import StopWords
from cog_triton.errors import InvalidArgument, TritonUnknownError

_UNSUPPORTED = {"bad_words": "bad_words_list", "guide": "guided_decoding_guide"}


@dataclass(frozen=True, slots=True)
class Output:
    """Planned output: `steps` tokens of `passage`, over and over, of which `tokens` are sent."""

    passage: list[int]
    steps: int
    tokens: int
    end: FinishReason | Injection

    def ids(self, start: int, stop: int) -> list[int]:
        """The tokens from one place of the output to another."""
        size = len(self.passage)
        return [self.passage[place % size] for place in range(start, stop)]


def plan_output(model: MockModel, request: MockRequest, skipped: int = 0) -> Output:
    """Plan what `request` is answered after its `made` tokens and `skipped` ones of the passage.

    One that may fill the model's context, as without a limit of its own, ends with the passage.
    Raises E1002 or E1005 for a request that cannot be served.
    """
    check_prompt(request, max_seq_len=model.max_seq_len, vocab_size=model.vocab_size)
    for attribute, name in _UNSUPPORTED.items():
        if getattr(request, attribute) and not (attribute == "guide" and model.answers):
            raise InvalidArgument(f"{name}: this engine does not support {name}")
    passage = model.output_for(request.input_ids)
    if allowed := request.sampling.allowed_token_ids:
        passage = [token for token in passage if token in allowed] or list(allowed)
    made = len(request.made)
    if start := (made + skipped) % len(passage):
        passage = passage[start:] + passage[:start]
    rest = request.as_prompt()
    end_ids, limits = request.end_ids(frozenset(model.eos_ids)), rest.sampling
    output = _stopped(rest, passage, end_ids)
    last = max(len(passage) - made, limits.min_tokens, 1)
    fills = len(rest.input_ids) + limits.max_tokens >= model.max_seq_len
    if end_ids and last < output.steps and fills:
        output = Output(passage, last, last, "stop")
    after = request.inject_after - made
    if request.inject is None or after < 0:
        return output
    if after >= output.steps:
        raise InvalidArgument(
            f"inject_after={after}: must be less than {output.steps}, the tokens that are made"
        )
    tokens = min(after, output.tokens)
    return replace(output, steps=after + 1, tokens=tokens, end=request.inject)


def _stopped(request: MockRequest, passage: list[int], end_ids: Set[int]) -> Output:
    """The output up to the first end id or stop word, or else up to `max_tokens`."""
    least, most = request.sampling.min_tokens, request.sampling.max_tokens
    if request.stop_words or not end_ids.isdisjoint(passage):
        words = StopWords(request.stop_words, least)
        # One pass over the passage finds whatever there is to find.
        longest = max(map(len, request.stop_words), default=0)
        for place in range(min(most, least + len(passage) + longest)):
            token = passage[place % len(passage)]
            if token in end_ids and place >= least:
                return Output(passage, place + 1, place, "stop")
            if words.add(token, 0.0):
                return Output(passage, place + 1, len(words.rest()), "stop")
    return Output(passage, most, most, "length")


_MIN_WAIT_S = 0.001
"""Shortest time between two timed wake-ups, so that many streams share one."""
_MAX_LATE_S = 0.25
"""Most time that late steps of a step clock make up for."""
_BLOCK_SIZE, _BLOCKS_PER_SLOT = 32, 64
_OF_PROMPT = -1.0
_SEED_STEP = 2654435761  # neighbouring seeds are far apart in the table
_random = random.Random(0)
_OFFSETS = [_random.random() - 0.5 for _ in range(4096)]


class Stream:
    """A request with its `output`, of which `made` tokens are made; the next are due at `due`.

    Token k, from 1 on, is due ``k / tps`` seconds after the prefill, however late others were. With
    a jitter up to 1 it is due up to half of that part of 1 / `tps` earlier or later, the same for
    the same seed; never before the one ahead of it. With a `tps` of 0 all are due at once.
    """

    def __init__(
        self, handle: int, request: MockRequest, output: Output, options: MockOptions
    ) -> None:
        self.handle = handle
        self.request = request
        self.output = output
        self.made = 0
        self.live = True
        self._group = options.tokens_per_response
        self._prefill_s = options.prefill_ms * len(request.input_ids) / 1000
        self._interval = 0.0 if options.step_ms or not options.tps else 1 / options.tps
        self._joins = options.join and self._interval > 0
        self._jitter = options.jitter
        self._seed = request.sampling.seed * _SEED_STEP
        self.timed = self._interval > 0
        self.plain = self._group == 1 and not (request.return_log_probs or request.echoed)
        self.alike = 0  # of so many tokens the events are those of any stream at that place

    def start(self, now: float) -> None:
        """Begin the prefill."""
        self._begin = now + self._prefill_s
        self.due = self._next_due()

    def make(self, now: float) -> None:
        """Make a group of tokens; if late ones are joined, all later groups that are due, too."""
        while True:
            self.made = min(self.made + self._group, self.output.steps)
            self.due = self._next_due()
            if not self._joins or self.due > now or self.made == self.output.steps:
                return

    def _next_due(self) -> float:
        """When the last token of the next group is due."""
        token = min(self.made + self._group, self.output.steps)
        stray = self._jitter and self._jitter * _OFFSETS[(self._seed + token) % len(_OFFSETS)]
        return self._begin + (token + stray) * self._interval


class MockEngine:
    """Mock engine; see `cog_triton.engines.base.StepEngine`.

    A step makes tokens of all streams that are due; the others wait for their time in a heap. With
    a step clock all streams are always due, and steps are when the clock says. Without, at an
    unlimited rate the engine makes what its readers take, and no more.
    """

    def __init__(
        self,
        model: MockModel,
        options: MockOptions,
        clock: Callable[[], float] = time.monotonic,
        registry: AdapterRegistry | None = None,
    ) -> None:
        """`registry` has the adapters: with one of rank r the text begins r tokens later."""
        self._model = model
        self._options = options
        self._clock = clock
        self._registry = registry
        self.max_batch_size = options.max_batch_size
        self.waits_for_readers = options.is_flat_out
        self._step_s = options.step_ms / 1000
        self._next_step = 0.0
        self._queued: dict[int, Stream] = {}
        self._slots: dict[int, Stream] = {}
        self._due: list[Stream] = []
        self._later: list[tuple[float, int, Stream]] = []
        self._order = itertools.count()
        self._alike = [TokenEvent([token], []) for token in model.output_ids]
        self._events: list[tuple[int, TokenEvent]] = []
        self._hangs = self._dies = False

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Open the engine that a rendered model's parameters describe."""
        registry = AdapterRegistry(Path(parameters[REGISTRY])) if REGISTRY in parameters else None
        model = read_model(Path(parameters["engine_dir"]))
        return cls(model, MockOptions.parse(options_of(parameters)), registry=registry)

    def wait_s(self) -> float | None:
        if self._events or self._dies:
            return 0.0
        if self._hangs or not self._slots:
            return None
        now, due = self._clock(), self._next_step
        if not self._step_s:
            if self._due or self._later[0][0] <= now:
                return 0.0
            due = max(due, self._later[0][0])
        return max(due - now, 0.0)

    def submit(self, handle: int, request: MockRequest) -> None:
        """See `StepEngine.submit`; a `MockRequest`."""
        skipped = 0
        if request.adapter is not None:
            if self._registry is None:
                raise InvalidArgument("lora_name: this server has no LoRA adapters")
            skipped = self._registry.find(request.adapter).rank
        output = plan_output(self._model, request, skipped)
        if not self._hangs:
            stream = Stream(handle, request.as_prompt(), output, self._options.of(request))
            if stream.plain and output.passage is self._model.output_ids:
                stream.alike = output.tokens
            self._queued[handle] = stream
            self._admit()

    def cancel(self, handle: int) -> None:
        """See `StepEngine.cancel`."""
        if self._hangs:
            return
        if stream := self._slots.get(handle):
            self._free_slot(stream)
        elif self._queued.pop(handle, None) is None:
            return
        self._events.append((handle, TokenEvent([], [], "cancelled")))

    def step(self) -> list[tuple[int, TokenEvent]]:
        """See `StepEngine.step`; the events that are due, none once it hangs."""
        if self._dies:  # now that the tokens from before it are sent
            os.kill(os.getpid(), signal.SIGKILL)
        now = self._clock()
        events, self._events = self._events, []
        if self._hangs or (self._step_s and now < self._next_step):
            return events
        if self._step_s:
            self._next_step = max(self._next_step + self._step_s, now - _MAX_LATE_S)
        else:
            self._next_step = now + _MIN_WAIT_S
        due, self._due = self._due, []
        while self._later and self._later[0][0] <= now:
            due.append(heapq.heappop(self._later)[2])
        stays, alike, size = self._due.append, self._alike, len(self._alike)
        for stream in due:
            if not stream.live:
                continue
            made = stream.made
            if not stream.timed and made + 1 < stream.alike:
                stream.made = made + 1
                events.append((stream.handle, alike[made % size]))
                stays(stream)
                continue
            stream.make(now)
            if made + 1 == stream.made < stream.alike:
                events.append((stream.handle, alike[made % size]))
            else:
                events += self._events_of(stream, made)
                if self._hangs or self._dies:
                    break
            if stream.live:
                self._schedule(stream, now)
        return events

    def kv_cache(self) -> KVCacheStats:
        """See `StepEngine.kv_cache`: 2048 tokens a slot, of which a stream uses whole blocks.

        No stream waits for blocks, and none are reused.
        """
        blocks = self._options.max_batch_size * _BLOCKS_PER_SLOT
        used = sum(
            math.ceil((len(stream.request.input_ids) + stream.made) / _BLOCK_SIZE)
            for stream in self._slots.values()
        )
        return KVCacheStats(min(1.0, used / blocks), _BLOCK_SIZE, blocks)

    def _admit(self) -> None:
        while self._queued and len(self._slots) < self.max_batch_size:
            now = self._clock()
            if not self._slots:
                self._next_step = max(self._next_step, now + self._step_s)
            handle = next(iter(self._queued))
            stream = self._slots[handle] = self._queued.pop(handle)
            stream.start(now)
            self._schedule(stream, now)

    def _schedule(self, stream: Stream, now: float) -> None:
        if stream.due <= now:
            self._due.append(stream)
        else:
            heapq.heappush(self._later, (stream.due, next(self._order), stream))

    def _free_slot(self, stream: Stream) -> None:
        stream.live = False
        del self._slots[stream.handle]
        self._admit()

    def _events_of(self, stream: Stream, sent: int) -> Iterator[tuple[int, TokenEvent]]:
        output, request, vocabulary = stream.output, stream.request, self._model.vocab_size
        ids = output.ids(min(sent, output.tokens), min(stream.made, output.tokens))
        log_probs: list[float] = []
        others: list[int] = []
        if request.echoed and not sent:
            values, likely = _top_log_probs(request.echoed, request.top_log_probs, vocabulary)
            values = [value + _OF_PROMPT for value in values]
            prompt = TokenEvent(list(request.echoed), values, alternatives=likely, of_prompt=True)
            yield stream.handle, prompt
        if request.return_log_probs:
            log_probs, others = _top_log_probs(ids, request.top_log_probs, vocabulary)
        ended = stream.made == output.steps
        finish = output.end if ended and output.end in ("stop", "length") else None
        if ids or finish:  # neither while a stop word is made
            yield stream.handle, TokenEvent(ids, log_probs, finish, alternatives=others)
        if not ended:
            return
        if output.end in ("crash", "hang"):
            self._dies, self._hangs = output.end == "crash", output.end == "hang"
            return
        if output.end == "error":
            error = TritonUnknownError(f"inject=error: as asked, after {output.tokens} tokens")
            yield stream.handle, TokenEvent([], [], error=error)
        self._free_slot(stream)


def _top_log_probs(ids: Sequence[int], top: int, vocab_size: int) -> tuple[list[float], list[int]]:
    """Log probabilities of tokens, and the ids of the `top` likeliest beside each.

    Each token is the likeliest, with 0.0; those with the next ids follow.
    """
    values = [0.0, *(-float(place) for place in range(top))]
    others = [(token + place) % vocab_size for token in ids for place in range(top)]
    return values * len(ids), others
