"""The one path from token ids to text: engine request, detokenizer, stop strings, counts."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from cog_triton.engines import tensor_contract
from cog_triton.engines.base import EngineLimits
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import CogTritonError, FrameworkError, PromptTooLong, TritonUnknownError
from cog_triton.serving.admission import Admission, Ticket
from cog_triton.settings import Settings
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.stream import TextStream
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.client import TritonClient
from cog_triton.triton.http_stream import HTTPStream

_request_numbers = itertools.count(1)


class TokenLogProb(NamedTuple):
    """A token that was chosen, and the natural logarithm of its probability."""

    token_id: int
    log_prob: float


@dataclass(slots=True)
class Generation:
    """One request and what became of it; counts are tokens, times are seconds.

    `notes` are remarks for the log of the prediction, such as a clamped max_tokens. `arrivals`
    are the times of `time.perf_counter`, each with the number of tokens that came then.
    `engine_inputs` are inputs that only this engine has, as JSON values for Triton. With `pauses`,
    the stream yields an empty text instead of waiting for `connection`.
    """

    input_ids: Sequence[int]
    sampling: SamplingParams
    stops: Sequence[str]
    notes: list[str] = field(default_factory=list)
    id: str = ""
    endpoint: str = ""
    ignore_eos: bool = False
    return_log_probs: bool = False
    guide: str | None = None
    engine_inputs: dict[str, Any] = field(default_factory=dict)
    pauses: bool = False
    connection: HTTPStream | None = None
    log_probs: list[TokenLogProb] = field(default_factory=list)
    started: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    output_token_count: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    time_to_first_token: float | None = None
    duration: float = 0.0
    ticket: Ticket = field(default_factory=Ticket)

    def cancel(self) -> None:
        """Stop the engine, from any thread; whoever reads the stream gets an error."""
        self.ticket.cancel()

    @property
    def queue_time(self) -> float | None:
        """How long it waited for its turn in the engine; None before its turn."""
        return self.ticket.queue_time

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole duration, as the seed reports it."""
        return self.output_token_count / self.duration if self.duration else 0.0


class Observer(Protocol):
    """Is told of every generation, on the thread that reads it."""

    def started(self, generation: Generation) -> None:
        """It has been asked for; from now on it waits or runs."""
        ...

    def ended(self, generation: Generation, error: BaseException | None) -> None:
        """It is over; `error` is what its reader gets, GeneratorExit for one who has left."""
        ...

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        """A request was turned away before there was anything to generate."""
        ...


class TextGenerator:
    """Turns token ids into streamed text through one Triton server."""

    def __init__(
        self,
        settings: Settings,
        limits: EngineLimits,
        tokenizer: EngineTokenizer,
        client: TritonClient,
        admission: Admission | None = None,
        on_failure: Callable[[], None] = lambda: None,
        encode_request: Callable[[EngineRequest], dict[str, Any]] = tensor_contract.encode_request,
        observer: Observer | None = None,
    ) -> None:
        """`on_failure` is called when the engine or Triton has failed a request, on any thread.

        `observer` is told of every generation. Without `admission` only the engine's batch
        bounds what runs at once, and the queue is endless. `encode_request` writes a request as the
        engine's family wants it.
        """
        self._settings = settings
        self._limits = limits
        self._max_seq_len = min(
            limits.max_seq_len, settings.max_sequence_length or limits.max_seq_len
        )
        self._tokenizer = tokenizer
        self._client = client
        self._admission = admission or Admission(limits.max_batch_size)
        self._on_failure = on_failure
        self._encode_request = encode_request
        self._observer = observer

    @property
    def max_seq_len(self) -> int:
        """How many tokens prompt and output may have together."""
        return self._max_seq_len

    def plan(
        self, input_ids: Sequence[int], sampling: SamplingParams, stops: Sequence[str] = ()
    ) -> Generation:
        """Fit a request into the engine's limits; raises E1002 when no output token fits."""
        room = self._max_seq_len - len(input_ids)
        if len(input_ids) > self._limits.max_input_len or room < 1:
            limit = min(self._limits.max_input_len, self._max_seq_len - 1)
            raise PromptTooLong(
                f"Prompt length ({len(input_ids)}) exceeds maximum input length ({limit})"
            )
        notes = []
        if sampling.max_tokens > room:
            notes.append(
                f"max_tokens {sampling.max_tokens} was clamped to {room}: prompt"
                f" ({len(input_ids)}) and output share {self._max_seq_len} tokens"
            )
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        return Generation(input_ids, sampling, stops, notes)

    def stream(self, generation: Generation) -> Generator[str, None, None]:
        """Text as it is generated; fills in `generation`. Blocks; closing it stops the engine.

        The first `next` waits for the request's turn; see `Admission.slot` for what it raises.
        """
        generation.started = time.perf_counter()
        if self._observer:
            self._observer.started(generation)
        error: BaseException | None = None
        try:
            yield from self._text(generation)
        except BaseException as raised:
            error = raised
            raise
        finally:
            generation.duration = time.perf_counter() - generation.started
            if self._observer:
                self._observer.ended(generation, error)

    def _text(self, generation: Generation) -> Generator[str, None, None]:
        sampling = generation.sampling
        text_stream = TextStream(self._tokenizer, generation.stops, min_tokens=sampling.min_tokens)
        try:
            with (
                self._admission.slot(generation.ticket),
                closing(self._tokens(generation)) as tokens,
            ):
                for ids in tokens:
                    if not ids:
                        yield ""
                        continue
                    now = time.perf_counter()
                    generation.arrivals.append((now, len(ids)))
                    if generation.time_to_first_token is None:
                        generation.time_to_first_token = now - generation.started
                    text = text_stream.feed(ids)
                    generation.output_token_count = text_stream.token_count
                    if text:
                        yield text
                    if text_stream.stopped:
                        break
            if text := text_stream.finish():
                yield text
            full = text_stream.token_count >= sampling.max_tokens and not text_stream.stopped
            generation.finish_reason = "length" if full else "stop"
        finally:
            generation.output_token_count = text_stream.token_count

    def probe(self) -> None:
        """One real token through the engine; raises what stands in the way."""
        request = EngineRequest(
            input_ids=self._tokenizer.encode("a"),
            sampling=SamplingParams(max_tokens=1),
            end_id=-1,
        )
        if not list(self._client.tokens(self._client.request(self._encode_request(request)))):
            raise TritonUnknownError("the engine answered the first request without a token")

    def _tokens(self, generation: Generation) -> Generator[list[int], None, None]:
        settings, limits = self._settings, self._limits
        end_id = limits.end_id if settings.end_id is None else settings.end_id
        request = EngineRequest(
            input_ids=generation.input_ids,
            sampling=generation.sampling,
            end_id=-1 if generation.ignore_eos else end_id,
            pad_id=limits.pad_id if settings.pad_id is None else settings.pad_id,
            return_log_probs=generation.return_log_probs,
            guide=generation.guide,
        )
        log_probs: list[float] | None = [] if generation.return_log_probs else None
        request_id = f"{os.getpid()}-{next(_request_numbers)}"
        values = {**self._encode_request(request), **generation.engine_inputs}
        http = generation.connection = self._client.request(values, request_id)
        http.pauses = generation.pauses
        ticket = generation.ticket
        ticket.on_end(http.abort)
        seen = False
        try:
            for ids in self._client.tokens(http, log_probs):
                seen = seen or bool(ids)
                if log_probs is not None:
                    generation.log_probs += map(TokenLogProb, ids, log_probs)
                    log_probs.clear()
                yield ids
        except FrameworkError:
            ticket.raise_error()
            if not ticket.cancelled:
                self._on_failure()
            raise
        finally:
            if ticket.cancelled and not (seen or ticket.error):
                # Triton notices a closed connection only when it writes to it.
                if generation.pauses:  # whoever reads it must not wait
                    threading.Thread(target=self._stop, args=[request_id], daemon=True).start()
                else:
                    self._stop(request_id)

    def _stop(self, request_id: str) -> None:
        try:
            self._client.stop(request_id)
        except FrameworkError as error:
            print(f"Warning: request {request_id} could not be stopped: {error}")
