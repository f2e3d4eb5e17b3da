"""Sequences of a request: `n` or `best_of` generations of each prompt, driven as one.

Each is an ordinary `Generation` with its own place in admission control; they end together when
their client leaves or one of them fails.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Any, Self

from cog_triton.engines.step_items import StepItem
from cog_triton.errors import InvalidArgument
from cog_triton.serving.admission import Admission
from cog_triton.serving.generate import Generation, TextGenerator
from cog_triton.serving.generation import GenerationRequest, TextPiece, TokenLogProb
from cog_triton.serving.inbox import Inbox
from cog_triton.serving.openai.parsers.borrowed import BorrowedStream
from cog_triton.serving.openai.shapes import Usage
from cog_triton.text.sampling import MAX_SEED

Pieces = Sequence[tuple[int, TextPiece | None]]
"""What sequences got, by their places."""
_IS_INTERRUPTED = attrgetter("interrupted")
MAX_LOG_PROBS = 1 << 22
"""Log probabilities of a request: each takes some 100 bytes until the answer is whole."""


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Planned sequences, prompt by prompt: `made` of each prompt, of which `shown` are answered."""

    requests: Sequence[GenerationRequest]
    made: int = 1
    shown: int = 1


def plan_sequences(
    prompts: Sequence[GenerationRequest], made: int, shown: int, *, seeded: bool
) -> SequencePlan:
    """Plan `made` sequences of each prompt, with seeds of their own.

    With a seed of the request (`seeded`), sequence i of any prompt has that plus i; else no two
    sequences have the same.
    """
    requests: list[GenerationRequest] = []
    for request in prompts:
        for number in range(made):
            offset = number if seeded else len(requests)
            own = request.engine.sampling.seed
            seed = type(own)((own + offset) & MAX_SEED)
            requests.append(_with_sampling(request, seed=seed))
    return SequencePlan(requests, made, shown)


def check_count(field: str, prompts: int, made: int, limit: int, admission: Admission) -> None:
    """Raise E1005 for more sequences than a request may have, or than could ever be admitted."""
    count = prompts * made
    if count == 1:
        return
    if prompts > 1 and made > 1:
        what = f"{prompts} prompts with {made} sequences each make {count}"
    else:
        what = f"{count} sequences" if made > 1 else f"{count} prompts"
    if count > limit:
        raise InvalidArgument(f"{field}: {what}; a request may have {limit} (MAX_SEQUENCES)")
    room = admission.slots + admission.max_queue
    if count > room:
        raise InvalidArgument(
            f"{field}: {what}; {room:g} run or wait at most (MAX_CONCURRENCY, MAX_QUEUE)"
        )


def bound_log_probs(
    prompts: list[GenerationRequest], made: int, top: int, *, limited: bool
) -> list[GenerationRequest]:
    """Prompts whose log probabilities, of all sequences, fit in memory; raises E1005 for others.

    Where the client has not `limited` the tokens, `max_tokens` is lowered to what fits.
    """
    of_prompts = sum(len(each.engine.echoed) for each in prompts)
    tokens = of_prompts + sum(each.engine.sampling.max_tokens for each in prompts)
    if (count := tokens * made * (top + 1)) <= MAX_LOG_PROBS:
        return prompts
    fits = (MAX_LOG_PROBS // (made * (top + 1)) - of_prompts) // len(prompts)
    least = max(1, *(each.engine.sampling.min_tokens for each in prompts))
    what = (
        f"log probabilities, which are {made} sequences of {len(prompts)} prompts, their tokens,"
        f" and {top} beside each; {MAX_LOG_PROBS} at most"
    )
    if limited or fits < least:
        raise InvalidArgument(f"logprobs: up to {count} {what} (see max_tokens, n, best_of)")
    return [_lowered(each, fits, f"{count} {what}") for each in prompts]


def _lowered(request: GenerationRequest, fits: int, why: str) -> GenerationRequest:
    asked = request.engine.sampling.max_tokens
    if asked <= fits:
        return request
    note = f"max_tokens {asked} was lowered to {fits}: {why}"
    return replace(_with_sampling(request, max_tokens=fits), notes=(note, *request.notes))


def _with_sampling(request: GenerationRequest, **values: Any) -> GenerationRequest:
    engine = request.engine
    return replace(request, engine=replace(engine, sampling=replace(engine.sampling, **values)))


class Sequences:
    """Running sequences of a plan; a context, within which `advance` is called."""

    def __init__(self, generator: TextGenerator, plan: SequencePlan) -> None:
        self.plan = plan
        self._admission = generator.admission
        self._inbox = Inbox()
        self._items: dict[int, list[StepItem]] = {}
        """What has come, by place; nothing after a mere wake-up."""
        self.generations = [
            Generation(generator, request, partial(self._put, place))
            for place, request in enumerate(plan.requests)
        ]
        self._running: dict[int, Generation] = {}
        self._failed = False

    @property
    def ended(self) -> bool:
        """Whether `advance` has given all text of all sequences."""
        return not self._running

    def done(self, place: int) -> bool:
        """Whether `advance` has given all text of the sequence in a place."""
        return self.generations[place].ended

    @property
    def interrupted(self) -> bool:
        """Whether any waits for the engine's return."""
        return any(map(_IS_INTERRUPTED, self._running.values()))

    @property
    def usage(self) -> Usage:
        """Tokens of all sequences so far, those of each prompt and its images counted once."""
        results = [generation.result for generation in self.generations]
        first = self.generations[:: self.plan.made]
        return Usage(
            sum(each.result.prompt_tokens(each.request) for each in first),
            sum(result.output_token_count for result in results),
            sum(each.result.cached_tokens for each in first),
            sum(result.reasoning_tokens for result in results),
        )

    def cancel(self) -> None:
        """End all sequences on behalf of their client."""
        for generation in self.generations:
            generation.ticket.cancel()

    def __enter__(self) -> Self:
        """Ask for admission of all; raises E2107 unless all have a place."""
        if len(self.generations) > 1:
            self._admission.require_room(len(self.generations), self.generations[0].request.tenant)
        for place, generation in enumerate(self.generations):
            try:
                generation.__enter__()
            except BaseException:
                self._failed = True
                self._end_running(None)
                raise
            self._running[place] = generation
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_running(error)

    async def advance(self, timeout: float | None = None) -> Pieces | None:
        """Wait; then, of each sequence that got something, its place and next piece, if any.

        None after `timeout` seconds. Raises the coded error of the first sequence that fails.
        """
        return None if await self._inbox.take(timeout) is None else self._advanced()

    async def handle(self, arrived: Callable[[Pieces], bool]) -> None:
        """As `advance`, but call `arrived` with the pieces, until it returns False.

        It is called on the event loop, without waking the task that waits here; see
        `Inbox.handle`. What it raises ends the waiting.
        """
        failed: list[Exception] = []

        def advance() -> bool:
            try:
                self._inbox.take_now()
                return arrived(self._advanced())
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                failed.append(error)
                return False

        await self._inbox.handle(advance)
        if failed:
            raise failed[0]

    def _put(self, place: int, item: StepItem | None) -> None:
        items = self._items.setdefault(place, [])
        if item is not None:
            items.append(item)
        self._inbox.put(None)

    def _advanced(self) -> Pieces:
        """The pieces of what has come."""
        arrived, self._items = self._items, {}
        return [
            (place, self._advance(place, arrived[place]))
            for place in sorted(arrived)
            if place in self._running
        ]

    def _advance(self, place: int, arrived: list[StepItem]) -> TextPiece | None:
        generation = self._running[place]
        try:
            piece = generation.advance(arrived)
        except BaseException:
            self._failed = True
            del self._running[place]
            generation.__exit__(*sys.exc_info())
            raise
        if generation.ended:
            del self._running[place]
            generation.__exit__(None, None, None)
        return piece

    def _end_running(self, error: BaseException | None) -> None:
        running, self._running = self._running, {}
        for generation in running.values():
            if self._failed:  # of another, so this one is no error of its own
                generation.ticket.cancel()
                generation.__exit__(None, None, None)
            else:
                generation.__exit__(type(error) if error else None, error, None)


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
