"""Text generation from token ids: admission, engine request, text pieces, cancellation.

Both APIs, /predictions and OpenAI's, go through it: an event loop drives a generation by
`Generation.advance` with what its inbox got. Prompts that the engine has died of are in quarantine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from cog_triton.engines.base import EngineLimits, ResumeRules
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import StepItem
from cog_triton.errors import (
    CogTritonError,
    FatalRequest,
    FrameworkError,
    InvalidArgument,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.serving.adapter_store import AdapterUse
from cog_triton.serving.admission import Admission
from cog_triton.serving.generation import (
    GenerationRequest,
    GenerationResult,
    Observer,
    TextDecoder,
    TextPiece,
)
from cog_triton.serving.inbox import Inbox
from cog_triton.serving.quarantine import Quarantine
from cog_triton.serving.resume import Resumption
from cog_triton.serving.tenant_limits import TenantLimits
from cog_triton.serving.tenants import CURRENT
from cog_triton.serving.ticket import Ticket
from cog_triton.settings import Settings
from cog_triton.text.prompt_encoder import PromptEncoder, prompt_too_long
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.infer_stream import Submission, TokenTransport

_log = logging.getLogger(__name__)

ToError = Callable[[str], CogTritonError]


class TextGenerator:
    """Generates text from token ids on one engine."""

    def __init__(
        self,
        settings: Settings,
        limits: EngineLimits,
        tokenizer: EngineTokenizer,
        transport: TokenTransport,
        to_error: ToError,
        admission: Admission | None = None,
        on_failure: Callable[[], None] = lambda: None,
        observer: Observer | None = None,
        resume_rules: ResumeRules | None = None,
        *,
        priorities: bool = False,
    ) -> None:
        """`to_error` gives the coded error behind an engine's error text.

        `on_failure` is called when the engine or Triton has failed a request.
        `observer` gets every generation. Without `admission`, the engine's batch size is the
        concurrency limit, and the queue is unbounded. With `priorities` the engine's scheduler is
        told those of requests.
        """
        self.limits = limits
        self._end_id = limits.end_id if settings.end_id is None else settings.end_id
        self._pad_id = limits.pad_id if settings.pad_id is None else settings.pad_id
        self.max_seq_len = min(
            limits.max_seq_len, settings.max_sequence_length or limits.max_seq_len
        )
        """Maximum number of tokens of prompt and output together."""
        self._max_input_len = min(limits.max_input_len, self.max_seq_len - limits.min_output)
        self._prompt_encoder = PromptEncoder(tokenizer, self._max_input_len)
        self.tokenizer = tokenizer
        self.transport = transport
        self.to_error = to_error
        self.admission = admission or Admission(limits.max_batch_size)
        self.on_failure = on_failure
        self.observer = observer
        self.resume_rules = resume_rules or ResumeRules()
        self.imports = False
        """Whether an engine that was ``asked`` has taken tokens as output."""
        self._to_ask = self.resume_rules.imports == "asked" and limits.min_output > 0
        self.adapter_use = AdapterUse()
        self.quarantine = Quarantine()
        self.tenant_limits = TenantLimits()
        self._priorities = priorities

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt; raises E1002, often before all of it is encoded; blocks."""
        return self._prompt_encoder.encode(text, add_special_tokens=add_special_tokens)

    def check_length(self, count: int) -> None:
        """Raise E1002 for `count` tokens that do not fit, or are too many for the prompt's key."""
        if (tenant := CURRENT.get()) is not None:
            tenant.require_length(count)
        if count > self._max_input_len:
            raise prompt_too_long(count, self._max_input_len)

    def plan(
        self,
        request: EngineRequest,
        stops: Sequence[str] = (),
        *,
        notes: Sequence[str] = (),
        **others: Any,
    ) -> GenerationRequest:
        """Fit a request into the engine's limits; raises E1002 when no output token fits.

        Its end and padding ids are the server's, where it has none. `others` are further fields of
        `GenerationRequest`.
        """
        count, sampling = len(request.input_ids), request.sampling
        self.check_length(count)
        room = self.max_seq_len - count
        if sampling.max_tokens > room:
            clamped = (
                f"max_tokens {sampling.max_tokens} was clamped to {room}: prompt"
                f" ({count}) and output share {self.max_seq_len} tokens"
            )
            notes = (clamped, *notes)
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        engine = replace(
            request,
            sampling=sampling,
            end_id=self._end_id if request.end_id is None else request.end_id,
            pad_id=self._pad_id if request.pad_id is None else request.pad_id,
        )
        planned = GenerationRequest(engine=engine, stops=stops, notes=notes, **others)
        if not self._priorities:
            return planned
        return replace(planned, engine=replace(engine, priority=planned.priority))

    async def probe(
        self, adapter: str | None = None, transport: TokenTransport | None = None
    ) -> None:
        """Readiness probe: generate one token, or an embedding; raises the coded error if it fails.

        `adapter` is one to generate it with, `transport` the way to one of several engines. The
        request does not go through admission, which is
        closed until the engine is ready.
        """
        request = EngineRequest(
            input_ids=self.tokenizer.encode("a"),
            sampling=SamplingParams(max_tokens=1),
            end_id=-1,
            adapter=adapter,
            embeds=not self.limits.min_output,
        )
        if not await self._answered(request, transport):
            raise TritonUnknownError("the engine answered the first request without a token")
        if self._to_ask and adapter is None:
            self._to_ask = False  # an engine that it ends is not asked again
            self.imports = await self._takes_output(request, transport)

    async def _takes_output(self, request: EngineRequest, transport: TokenTransport | None) -> bool:
        """Whether the engine takes a token as output, and makes the next one."""
        sampling = SamplingParams(max_tokens=2)
        asked = replace(request, sampling=sampling, made=request.input_ids[-1:])
        try:
            taken = len(await self._answered(asked, transport)) == 1
        except InvalidArgument as error:
            _log.warning("generations go on from prompt and tokens made: %s", error.detail)
            return False
        told = "takes tokens as output" if taken else "has not taken a token as output"
        _log.info("the engine %s, for generations that outlive its death", told)
        return taken

    async def greedy_ids(self, input_ids: Sequence[int], count: int) -> list[int]:
        """`count` token ids that follow greedily; as `probe`, it does not go through admission."""
        sampling = SamplingParams(max_tokens=count)
        request = EngineRequest(input_ids=input_ids, sampling=sampling, end_id=-1)
        return [int(number) for number in await self._answered(request)]

    async def _answered(
        self, request: EngineRequest, transport: TokenTransport | None = None
    ) -> list[float]:
        """All token ids of the answer, or the numbers of an embedding; raises its coded error."""
        inbox = Inbox()
        submission = (transport or self.transport).submit(request, {}, inbox.put)
        found: list[float] = []
        try:
            while True:
                for item in await inbox.take() or ():
                    found += item.ids or item.log_probs
                    if item.error is not None:
                        raise self.to_error(item.error)
                    if item.end:
                        return found
        finally:
            submission.cancel()


class Generation:
    """A generation from its arrival to its end; a context, within which `advance` is called.

    When the engine is lost to it (E2105), it waits for its return, and goes on from the prompt and
    the tokens made: `Admission` says when.
    """

    def __init__(
        self,
        generator: TextGenerator,
        request: GenerationRequest,
        put: Callable[[StepItem | None], None],
    ) -> None:
        """`put` gets an item, or None, if `advance` is to be called."""
        self.request = request
        self.result = GenerationResult()
        priority = request.priority if request.tenant else 0  # without tenants in order of arrival
        prompt_tokens = len(request.engine.input_ids)
        self.ticket = Ticket(request.tenant, priority, prompt_tokens, self._made)
        self._generator = generator
        self._put = put
        self._decoder = TextDecoder(request, self.result, generator.tokenizer)
        self._submission: Submission | None = None
        self._engine_ended = False
        self._failed: str | None = None
        self._resumption = Resumption(
            request.engine,
            self._decoder,
            self.result,
            generator.resume_rules,
            generator.limits,
            lambda: generator.imports,
        )

    def _made(self) -> int:
        return self.result.output_token_count

    @property
    def interrupted(self) -> bool:
        """Whether the engine was lost, and has made no new token since."""
        return self._resumption.waits

    @property
    def ended(self) -> bool:
        """Whether `advance` has given all text."""
        return self._decoder.ended

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens of the engine so far."""
        return self._decoder.made

    def __enter__(self) -> Self:
        """Ask for admission; raises E2107 when the queue is full, or why there is no service."""
        self._decoder.started = time.perf_counter()
        self._generator.adapter_use.enter(self.request, self.result)
        try:
            self._generator.quarantine.check(self.request)
            self._generator.admission.enter(self.ticket, lambda: self._put(None))
            self._generator.tenant_limits.used(self.request.tenant, self.ticket.prompt_tokens)
            self.ticket.on_end(self._on_ticket_end)
            self._submit_if_admitted()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(error)

    def advance(self, items: Sequence[StepItem]) -> TextPiece | None:
        """The next piece of text, None if these items complete none; raises the coded error."""
        idle = not items or self._submission is None  # or late items of a submission that failed
        if idle and not (self._failed or self.ticket.ended):
            self._submit_if_admitted()
            return None
        try:
            if self.ticket.ended:
                waited = "" if self._submission else " while it waited for its turn"
                raise TritonUnavailable(f"cancelled{waited}")
            if self._failed is not None:
                raise self._generator.to_error(self._failed)
            self._engine_ended = bool(items[-1].end)
            try:
                piece, self._failed = self._decoder.feed(items)
            except TritonUnavailable as lost:
                if self._interrupt(lost):
                    return None
                raise
            if self.ticket.exposed and self._decoder.resumed:
                self._generator.admission.proven(self.ticket)
                self._resumption.proven()
            if self._resumption.waits and self._decoder.goes_on:
                self._resumption.went_on()
            if self._failed is not None:
                try:
                    if self._interrupt(self._generator.to_error(self._failed)):
                        self._failed = None
                        return piece
                except TritonUnavailable as error:
                    self._failed = str(error)
                if piece is None:
                    raise self._generator.to_error(self._failed)
                self._put(None)  # the text comes first
            return piece
        except FrameworkError:
            self._report_failure()
            raise

    def _report_failure(self) -> None:
        """Raise the error that the ticket was failed with, or have the engine checked."""
        self.ticket.raise_error()
        if not self.ticket.cancelled:
            self._generator.on_failure()

    def _submit_if_admitted(self) -> None:
        if self._submission or not self.ticket.turn or self.ticket.ended:
            return
        generator, request = self._generator, self.request
        generator.quarantine.check(request)
        if not self._resumption.waits:
            self.result.queue_time = self.ticket.queue_time
            generator.adapter_use.admitted(self.result)
        engine_request = self._resumption.next_request()
        generator.admission.sent(self.ticket)
        try:
            self._submission = generator.transport.submit(
                engine_request, request.engine_inputs, self._put
            )
        except FrameworkError as error:
            if self._interrupt(error):
                return
            self._report_failure()
            raise
        self.ticket.replica = self._submission.replica

    def _interrupt(self, error: CogTritonError) -> bool:
        """Whether it waits for the engine's return; raises E2105 saying why it cannot go on."""
        admission = self._generator.admission
        if not (admission.resumes and isinstance(error, TritonUnavailable)) or self.ticket.ended:
            return False
        if last := self._decoder.last_item:
            self._put(last)
            return True
        self._resumption.require(error)
        if not admission.interrupt(self.ticket):
            return False
        submission, self._submission = self._submission, None
        self._resumption.begin()
        if submission is not None:
            submission.cancel()
        self._generator.on_failure()
        return True

    def _on_ticket_end(self) -> None:
        if self._submission is not None:
            self._submission.cancel()
        self._put(None)

    def _end(self, error: BaseException | None) -> None:
        if self._submission is not None and not self._engine_ended:
            self._submission.cancel()
        self._generator.admission.leave(self.ticket)
        self._generator.adapter_use.leave(self.result)
        self._generator.tenant_limits.used(self.request.tenant, self._made())
        self.result.duration = time.perf_counter() - self._decoder.started
        if isinstance(self.ticket.error, FatalRequest):
            self._generator.quarantine.add(self.request)
        gone = isinstance(error, GeneratorExit | asyncio.CancelledError)
        self.result.cancelled = self.ticket.cancelled or gone
        if observer := self._generator.observer:
            observer.ended(self.request, self.result, error)
