"""Session of a step stream: steps in order, each once, dealt out to the requests that run.

Steps are numbered: one that is missing is asked for again, and all before it wait in the stub. What
cannot be had again ends only the requests that were in it: items carry their offset, and a
request's own answer tells which step has its end.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cog_triton.engines import step_numbering as wire
from cog_triton.engines.generate_stream import (
    ToError,
    excerpt,
    http_error,
    parse_response,
    timed_out,
)
from cog_triton.engines.step_items import decode
from cog_triton.engines.step_numbering import StepAccount
from cog_triton.errors import CogTritonError, TritonMalformedEvent, TritonUnavailable
from cog_triton.triton.token_transport import Put, as_list, failure
from cog_triton.triton.triton_connections import Exchange, Receiver

_log = logging.getLogger(__name__)

_OPENING_S = 60.0
_SILENCE_S = 10.0

Send = Callable[[Mapping[str, Any], Receiver, bool], Exchange]
"""Sends inputs to the model: (inputs, receiver, whether the answer is a stream)."""


@dataclass(slots=True)
class StepStatistics:
    """Counts over all sessions: `lag` is the number of steps that came in the last read."""

    last_token_at: float = 0.0
    lost_steps: int = 0
    lag: int = 0


class StepLoad(NamedTuple):
    """Requests in an engine, and the tokens of those prompts that have brought no token yet."""

    requests: int
    waiting_tokens: int


class StepSubmission:
    """A running request; `ends_at` is the step that has its end, once its answer told that."""

    __slots__ = ("_sent_at", "_session", "ends_at", "handle", "last_at", "prompt", "put", "replica")

    def __init__(self, session: StepSession, handle: int, put: Put, prompt: int) -> None:
        self._session = session
        self.replica = session.replica
        self.handle = handle
        self.put = put
        self.prompt = prompt
        self.last_at = self._sent_at = time.monotonic()
        self.ends_at: int | None = None

    @property
    def waits(self) -> bool:
        """Whether it has got nothing yet."""
        return self.last_at == self._sent_at

    def cancel(self) -> None:
        """See `Submission.cancel`."""
        self._session.cancel(self.handle)

    def on_payloads(self, payloads: list[bytes]) -> None:
        """See `Receiver.on_payloads`; the answer is no stream."""

    def on_end(self, status: int, body: bytes) -> None:
        """See `Receiver.on_end`: an end that no step has brought by then was lost."""
        if self.handle not in self._session.running:
            return
        if status != 200:
            self._session.fail(self, http_error(status, body, self._session.to_error))
            return
        try:
            self.ends_at = int(parse_response(body, self._session.to_error)[wire.NUMBER])
        except (CogTritonError, KeyError, TypeError, ValueError) as error:
            self._session.fail(
                self, TritonMalformedEvent(f"the answer to a request: {error!r}: {excerpt(body)}")
            )

    def on_failure(self, error: TritonUnavailable) -> None:
        """See `Receiver.on_failure`."""
        self._session.fail(self, error)


class StepSession:
    """One open step stream: `Receiver` of its steps, with the requests that named it.

    `ready` is set when the first heartbeat has come, or with an `error` when it broke before.
    """

    def __init__(
        self,
        send: Send,
        to_error: ToError,
        timeout: float,
        statistics: StepStatistics,
        on_break: Callable[[], None] = lambda: None,
        *,
        replica: int = 0,
    ) -> None:
        """`send` sends a request to the model; `timeout` is in seconds between a request's items.

        Its requests go to the engine `replica`.

        `on_break` is called on the reader's thread when the stream has ended unasked. Raises E2105
        when Triton cannot be reached.
        """
        self._send_request = send
        self.replica = replica
        self.to_error = to_error
        self._timeout = timeout
        self._statistics = statistics
        self._on_break = on_break
        self._unsent: deque[tuple[Mapping[str, Any], StepSubmission]] = deque()
        self._name = secrets.token_hex(16)
        self._handles = itertools.count(1)
        self.running: dict[int, StepSubmission] = {}
        self.ready = threading.Event()
        self.closed = False
        self.error: CogTritonError | None = None
        self._steps = StepAccount()
        self._heard_at = time.monotonic()
        self._exchange: Exchange | None = None
        which = {wire.REPLICA: replica} if replica else {}
        self._exchange = send(self._command(wire.OPEN, which), self, True)
        if self.closed:  # the reader was faster
            self._exchange.abort()

    @property
    def load(self) -> StepLoad:
        """What the engine has to do for those that run."""
        running = list(self.running.values())
        return StepLoad(len(running), sum(one.prompt for one in running if one.waits))

    def submit(self, values: Mapping[str, Any], put: Put, prompt: int = 0) -> StepSubmission:
        """Send a request, at once or when the stream is open; raises E2105 if it has ended.

        `prompt` is the number of its tokens.
        """
        handle = next(self._handles)
        submission = self.running[handle] = StepSubmission(self, handle, put, prompt)
        if self.closed:  # it closed since the caller looked
            self.running.pop(handle, None)
            raise TritonUnavailable("the connection to the engine has ended; try again")
        command = self._command(wire.SUBMIT, {wire.HANDLE: handle})
        self._unsent.append(({**values, **command}, submission))
        if self.ready.is_set():
            self._send_requests()
        return submission

    def cancel(self, handle: int) -> None:
        """Stop a request, if it runs, on behalf of its caller."""
        if self.running.pop(handle, None) is not None:
            self._tell(wire.STOP, {wire.HANDLE: handle})

    def fail(self, submission: StepSubmission, error: CogTritonError) -> None:
        """End a request with an error, if it runs."""
        if self.running.pop(submission.handle, None) is not None:
            submission.put(failure(submission.handle, error))

    def close(self) -> None:
        """End the stream on both sides; requests that run fail."""
        if not self.closed:
            self._tell(wire.CLOSE, {})
            self._end(TritonUnavailable("the server is stopping; try again"))

    def on_payloads(self, payloads: list[bytes]) -> None:
        """See `Receiver.on_payloads`."""
        self._heard_at = time.monotonic()
        self._statistics.lag = len(payloads)
        for payload in payloads:
            try:
                self._take(parse_response(payload, self.to_error))
            except CogTritonError as error:
                self._break(error)
                return
        if self._steps.is_ack_due():
            self._acknowledge(self._heard_at)

    def on_end(self, status: int, body: bytes) -> None:
        """See `Receiver.on_end`: it should not end."""
        if status != 200:
            self._break(http_error(status, body, self.to_error))
        else:
            self._break(TritonUnavailable("the step stream has ended; try again"))

    def on_failure(self, error: TritonUnavailable) -> None:
        """See `Receiver.on_failure`."""
        self._break(error)

    def on_tick(self, now: float) -> None:
        """Acknowledge steps, and look for requests that wait for what does not come."""
        self._acknowledge(now)
        limit = _SILENCE_S if self.ready.is_set() else _OPENING_S
        if now - self._heard_at > limit:
            self._break(TritonUnavailable(f"the step stream was silent for {limit:g} s"))
            return
        for submission in list(self.running.values()):
            if submission.ends_at is not None and self._steps.last >= submission.ends_at:
                self.fail(submission, _lost())
            elif now - submission.last_at > self._timeout:
                self.cancel_after(submission, timed_out(self._timeout))

    def cancel_after(self, submission: StepSubmission, error: CogTritonError) -> None:
        """Fail a request, and stop the engine's work on it."""
        if submission.handle in self.running:
            self._tell(wire.STOP, {wire.HANDLE: submission.handle})
            self.fail(submission, error)

    def _take(self, event: dict[str, Any]) -> None:
        step: Any = event.get(wire.STEP)
        head, now = wire.read_head(step), self._heard_at
        if head.flags & wire.HEARTBEAT and not self.ready.is_set():
            self.ready.set()
            self._send_requests()
        deals = self._steps.take(head, now)
        self._ask_for_missing()
        if not deals:
            return
        floats, errors = as_list(event.get(wire.LOG_PROBS)), as_list(event.get(wire.ERRORS))
        running = self.running
        self._statistics.last_token_at = now
        for item in decode(step[wire.HEAD :], floats, errors):
            submission = running.get(item.handle)
            if submission is not None:
                submission.last_at = now
                if item.end:
                    running.pop(item.handle, None)
                submission.put(item)

    def _ask_for_missing(self) -> None:
        missing, self._steps.missing = self._steps.missing, None
        if missing is not None:
            self._send(self._command(wire.RESEND, {wire.NUMBER: missing}), _Answer(self._on_resend))

    def _on_resend(self, outputs: Mapping[str, Any] | None) -> None:
        first = outputs and outputs.get(wire.NUMBER)
        if isinstance(first, int) and (lost := self._steps.resent_from(first)):
            self._statistics.lost_steps += lost
            _log.error("%d steps of the engine were lost on the way", lost)

    def _acknowledge(self, now: float) -> None:
        number = self._steps.acknowledgement(now)
        if number is not None:
            self._send(
                self._command(wire.ACK, {wire.NUMBER: number}),
                _Answer(
                    lambda outputs: self._steps.acknowledged(None if outputs is None else number)
                ),
            )

    def _send_requests(self) -> None:
        """Send requests that wait, on any thread; each is taken by one."""
        while self._unsent:
            try:
                values, submission = self._unsent.popleft()
            except IndexError:
                return
            if submission.handle not in self.running:  # cancelled meanwhile
                continue
            try:
                self._send_request(values, submission, False)
            except TritonUnavailable as error:
                self.fail(submission, error)

    def _tell(self, command: str, values: Mapping[str, int]) -> None:
        self._send(self._command(command, values), _Answer(lambda outputs: None))

    def _send(self, values: dict[str, Any], answer: _Answer) -> None:
        try:
            self._send_request(values, answer, False)
        except TritonUnavailable as error:
            _log.debug("%s: %s", values[wire.COMMAND], error)
            answer.on_failure(error)

    def _command(self, command: str, values: Mapping[str, int]) -> dict[str, Any]:
        return {wire.STREAM: self._name, wire.COMMAND: command, **values}

    def _break(self, error: CogTritonError) -> None:
        if not self.closed:
            if self.ready.is_set():
                _log.warning("the step stream broke: %s", error)
            self.closed = True
            self._on_break()  # first: a request that fails may be sent again at once
            unavailable = isinstance(error, TritonUnavailable)
            self._end(
                error if unavailable else TritonUnavailable(f"the step stream broke: {error}")
            )

    def _end(self, error: CogTritonError) -> None:
        self.closed, self.error = True, error
        if self._exchange is not None:
            self._exchange.abort()
        for submission in list(self.running.values()):
            self.fail(submission, error)
        self.ready.set()


class _Answer:
    """Receiver of a command's answer; `on_answer` gets its outputs, None for an error."""

    def __init__(self, on_answer: Callable[[Mapping[str, Any] | None], None]) -> None:
        self._on_answer = on_answer

    def on_payloads(self, payloads: list[bytes]) -> None:
        """See `Receiver.on_payloads`; the answer is no stream."""

    def on_end(self, status: int, body: bytes) -> None:
        """See `Receiver.on_end`."""
        if status != 200:
            _log.debug("a command of the step stream: %s", excerpt(body))
            self._on_answer(None)
            return
        self._on_answer(parse_response(body, TritonUnavailable) if body.strip() else {})

    def on_failure(self, error: TritonUnavailable) -> None:
        """See `Receiver.on_failure`."""
        self._on_answer(None)


def _lost() -> TritonUnavailable:
    return TritonUnavailable("tokens were lost on their way from the engine; try again")
