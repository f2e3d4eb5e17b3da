"""Parsers of vLLM, borrowed: answers are parsed in a child process, in vLLM's own Python.

Deltas of all streams cross together, text and token ids, and what they complete comes back. Of a
parser that raises, runs on or eats memory only its own request fails (E2114): the child forks
anew, and the other streams are parsed again up to where they were.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from cog_triton.engines.vllm import parser_child
from cog_triton.errors import CogTritonError, InvalidArgument, ParserFailed, TritonStartFailed
from cog_triton.ipc.child import READY, PythonChild
from cog_triton.serving.openai.parsers.call_parser import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
)
from cog_triton.settings.request_defaults import PREFIX
from cog_triton.system import isolated_python

_log = logging.getLogger(__name__)

CPU_S = 2.0
MEMORY_BYTES = 1 << 30
_START_S = 300.0
_ANSWER_S = 30.0
_STOP_S = 2.0
_MOST_ITEMS = 512
_MOST_REPLY = 64 << 20
_MOST_DEATHS = 8
_REASONS = {
    -signal.SIGPROF: "it takes more than {0:g} s of CPU time",
    -signal.SIGALRM: "it does not end",
    parser_child.OUT_OF_MEMORY: "it takes more than {1} MiB of memory",
}
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_PASSED = ("HOME", "TIKTOKEN_ENCODINGS_BASE", "TIKTOKEN_RS_CACHE_DIR")

Item = Sequence[Any]
_Plan = tuple[Future[Any], Item]


class RequestPlan(NamedTuple):
    """What vLLM's parser makes of a request: `visible` says whether special tokens are text.

    `tag` is the structural tag that guides the answer, None without one; `json` whether vLLM
    itself has calls that are forced written as JSON.
    """

    visible: bool
    tag: str | None
    json: bool


class _Died(Exception):
    """The fork has ended; the child has another one, unless it is `gone`.

    It is `certain` where the limit that ended it was exceeded by what it did then.
    """

    def __init__(self, reason: str, certain: bool, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.certain, self.gone = certain, gone


class BorrowedStream:
    """Stream of one answer: text and token ids in, and what came back of them.

    As a parser of reasoning it is the first of an `AnswerParser`, with deltas of calls as well.
    """

    def __init__(self, parsers: BorrowedParsers, spec: Mapping[str, Any]) -> None:
        """`spec` are fields of vLLM's request, and `prompt_token_ids`."""
        self._parsers = parsers
        self._spec = spec
        self._arrived: deque[Delta] = deque()
        self._sent = 0
        self._calls: dict[int, int] = {}
        self.number = 0
        self.history: list[Item] = []
        """All items so far, those that open it first."""
        self.answered = 0
        """How many of them have their result."""
        self.failure: CogTritonError | None = None
        self.closed = False
        self.on_result: Callable[[], object] = lambda: None
        """Called on another thread once there is something new."""

    def __deepcopy__(self, memo: object) -> BorrowedStream:
        return BorrowedStream(self._parsers, self._spec)

    def begin(self, prompt: Sequence[int], on_result: Callable[[], object]) -> None:
        """Open it for an answer to a prompt."""
        self.on_result = on_result
        spec = {**self._spec, "prompt_token_ids": list(prompt)}
        self._parsers.open(self, spec)

    def send(self, text: str, ids: Sequence[int], *, finished: bool) -> None:
        """Have new text and token ids parsed."""
        self._sent += 1
        self._parsers.put(self, ["delta", self.number, text, ids, finished])

    def send_whole(self, text: str, ids: Sequence[int]) -> None:
        """Have a whole answer parsed, in place of what `send` sends."""
        self._sent += 1
        self._parsers.put(self, ["whole", self.number, text, ids])

    @property
    def has_results(self) -> bool:
        """Whether there is something new: deltas, or that all of them are there."""
        return bool(self._arrived) or self.failure is not None

    @property
    def waits(self) -> bool:
        """Whether results are still to come."""
        return self.failure is None and self.answered <= self._sent

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return bool(self._calls)

    def close(self) -> None:
        """Forget it."""
        if not self.closed:
            self.closed = True
            self._parsers.put(self, ["close", self.number])

    def feed(self, text: str) -> list[Delta]:
        """The deltas that have come; raises E2114 once the parser has failed."""
        if self.failure is not None:
            raise self.failure
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def finish(self) -> list[Delta]:
        """See `feed`."""
        return self.feed("")

    def take(self, found: Sequence[Sequence[Any]] | str | None) -> None:
        """Take the next result, on the thread of the child: deltas, or the text of an error."""
        if self.failure is not None or self.closed:
            return
        if isinstance(found, str):
            self.failure = ParserFailed(f"vLLM's parser {self._parsers.title} fails: {found}")
        elif found:
            try:
                for delta in found:
                    self._add(*delta)
            except (LookupError, TypeError) as error:
                self.failure = ParserFailed(f"vLLM's parser gives no deltas: {error!r}")
        self.answered += 1
        self.on_result()

    def _add(self, kind: str, value: Any, text: str = "") -> None:
        """Add a delta: of a text, or of a call that vLLM has numbered."""
        if kind == "content":
            self._arrived.append(Content(value))
        elif kind == "reasoning":
            self._arrived.append(Reasoning(value))
        elif kind == "call":
            self._calls[value] = len(self._calls)
            self._arrived.append(CallStart(self._calls[value], text))
        else:
            self._arrived.append(CallArguments(self._calls[value], text))


class BorrowedParsers:
    """vLLM's parsers of one model, in a child of this process; thread-safe."""

    def __init__(
        self,
        python: Path,
        links: Path,
        tokenizer_dir: Path,
        names: tuple[str, str],
        *,
        model_type: str = "",
        cpu_seconds: float = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Start the child, which takes as long as vLLM takes to be imported.

        `names` are those of the parsers of tool calls and of reasoning, blank for none and `auto`
        for that of the model's type. `links` is a directory for what leads `python` to this
        package. Limits are CPU seconds of a step of an answer, and bytes of memory.

        Raises:
            InvalidArgument: vLLM has no parser of that name.
            TritonStartFailed: vLLM cannot be imported, or its parser not be made.
        """
        found = isolated_python.environment_of(str(python), links)
        variables = {"PATH": found["PATH"], "PYTHONPATH": found["PYTHONPATH"]}
        variables |= {name: os.environ[name] for name in _PASSED if name in os.environ}
        self._start_options = python, {**variables, **_QUIET}
        self._limits = cpu_seconds, memory_bytes
        self._arguments = (*self._limits, tokenizer_dir, *names, model_type)
        self._queue: queue.SimpleQueue[tuple[BorrowedStream | Future[Any], Item] | None] = (
            queue.SimpleQueue()
        )
        self._streams: dict[int, BorrowedStream] = {}
        self._closed = False
        self._numbers, self._requests = count(1), count(1)
        self._child = self._start()
        ready = json.loads(self._child.ready)
        self.version, self.tool, self.reasoning = (
            str(ready[name]) for name in ("version", "tool", "reasoning")
        )
        self._thread = threading.Thread(target=self._run, name="parsers", daemon=True)
        self._thread.start()

    @property
    def title(self) -> str:
        """Names of the parsers, for errors and the log."""
        return " and ".join(dict.fromkeys(filter(None, (self.tool, self.reasoning))))

    @staticmethod
    def title_of(name: str) -> str | None:
        """A parser's name as the settings have it, None without one."""
        return PREFIX + name if name else None

    def plan(self, spec: Mapping[str, Any]) -> RequestPlan:
        """What a request needs, by fields of vLLM's; blocks. Raises E1005 if vLLM refuses it."""
        answer: Future[Any] = Future()
        self._queue.put((answer, ["plan", spec]))
        try:
            found = answer.result(_START_S)
        except TimeoutError as error:
            raise ParserFailed(f"vLLM's parser {self.title} does not answer") from error
        if isinstance(found, str):
            raise InvalidArgument(f"tools: vLLM's parser {self.title} does not take them: {found}")
        return RequestPlan(found["visible"], found["tag"], found["json"])

    def open(self, stream: BorrowedStream, spec: Mapping[str, Any]) -> None:
        """Open a stream in the child."""
        stream.number = next(self._numbers)
        self.put(stream, ["open", stream.number, spec])

    def put(self, stream: BorrowedStream, item: Item) -> None:
        """Have an item of a stream carried out, after those before it."""
        self._queue.put((stream, item))

    def close(self) -> None:
        """End the child."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(_STOP_S)
        self._child.close()

    def _start(self) -> PythonChild:
        """A child that is ready; raises as the constructor."""
        python, variables = self._start_options
        try:
            started = PythonChild(
                parser_child.__name__,
                *self._arguments,
                timeout=_START_S,
                python=python,
                variables=variables,
            )
        except OSError as error:
            raise TritonStartFailed(
                f"the process of vLLM's parsers does not start, in {python}: {error}"
            ) from error
        ready = json.loads(started.ready)
        if "error" not in ready:
            started.connection.settimeout(_ANSWER_S)
            return started
        started.close()
        if ready["unknown"]:
            raise InvalidArgument(f"TOOL_CALL_PARSER, REASONING_PARSER: {ready['error']}")
        raise TritonStartFailed(f"vLLM's parsers cannot be used, in {python}: {ready['error']}")

    def _run(self) -> None:
        """Carry out what is asked, all that has come at once; on a thread of its own."""
        while (first := self._queue.get()) is not None:
            batch = [first]
            while len(batch) < _MOST_ITEMS and not self._queue.empty():
                if (more := self._queue.get()) is None:
                    self._queue.put(None)
                    break
                batch.append(more)
            try:
                self._carry_out(batch)
            except Exception as error:  # noqa: BLE001 - answers wait for this thread
                _log.exception("vLLM's parsers")
                self._fail(None, _plans(batch), f"{type(error).__name__}: {error}")

    def _carry_out(self, batch: Sequence[tuple[BorrowedStream | Future[Any], Item]]) -> None:
        for whose, item in batch:
            if isinstance(whose, Future):
                continue
            if item[0] == "close":
                self._streams.pop(whose.number, None)
            elif whose.failure is None:
                if item[0] == "open":
                    self._streams[whose.number] = whose
                whose.history.append(item)
        try:
            results = self._ask([item for _, item in batch])
        except _Died as death:
            self._begin_again(death, _plans(batch))
            return
        for (whose, item), found in zip(batch, results, strict=True):
            if isinstance(whose, Future):
                whose.set_result(found)
            elif item[0] != "close":
                whose.take(found)

    def _begin_again(self, death: _Died, left: list[_Plan]) -> None:
        """Have each stream parsed again, alone, so that one at fault is known; then each plan."""
        suspects: Counter[object] = Counter()
        while not self._closed:
            _log.warning("the process of vLLM's parsers has ended: %s; going on anew", death)
            current: BorrowedStream | Future[Any] | None = None
            try:
                if death.gone:
                    self._child.close()
                    self._child = self._start()
                self._ask([["clear"]])
                for current in list(self._streams.values()):
                    self._replay(current)
                while left:
                    current, item = left[0]
                    current.set_result(self._ask([item])[0])
                    left.pop(0)
                return
            except _Died as own:
                death = own
                suspects[current] += 1
                if current is None and suspects[current] < _MOST_DEATHS:
                    continue
                if death.certain or suspects[current] > 1:
                    self._fail([current] if current else None, left, str(death))
            except CogTritonError as error:  # it does not start
                self._fail(None, left, error.detail)
                return

    def _fail(
        self,
        whose: Sequence[BorrowedStream | Future[Any]] | None,
        plans: list[_Plan],
        why: str,
    ) -> None:
        """Fail these, or all."""
        everyone: list[BorrowedStream | Future[Any]] = [*self._streams.values()]
        everyone += [plan for plan, _ in plans]
        for each in everyone if whose is None else whose:
            if isinstance(each, BorrowedStream):
                each.take(why)
                self._streams.pop(each.number, None)
            else:
                each.set_result(why)
                plans[:] = [pair for pair in plans if pair[0] is not each]

    def _replay(self, stream: BorrowedStream) -> None:
        """Parse all of a stream again, and give it what it has not got yet."""
        known = stream.answered
        for start in range(0, len(stream.history) if stream.failure is None else 0, _MOST_ITEMS):
            results = self._ask(stream.history[start : start + _MOST_ITEMS])
            for found in results[max(known - start, 0) :]:
                stream.take(found)

    def _ask(self, items: Sequence[Item]) -> list[Any]:
        """The results of items; raises _Died if the fork has ended, or the child."""
        number = next(self._requests)
        try:
            self._child.send(json.dumps([number, items], separators=(",", ":")).encode())
            while True:
                kind, data = self._child.receive(_MOST_REPLY)
                found = json.loads(bytes(data))
                if kind == READY:
                    raise _Died(*self._reason(int(found["ended"])))
                if found[0] == number:  # else of before the fork's end
                    results: list[Any] = found[1]
                    return results
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise _Died(f"{type(error).__name__}: {error}", certain=False, gone=True) from error

    def _reason(self, code: int) -> tuple[str, bool]:
        """Why the fork has ended with a code, and whether what it did then is at fault."""
        cpu_seconds, memory_bytes = self._limits
        found = _REASONS.get(code)
        if found is None:
            return f"its process ended with {code}", False
        return found.format(cpu_seconds, memory_bytes >> 20), True


def _plans(batch: Sequence[tuple[BorrowedStream | Future[Any], Item]]) -> list[_Plan]:
    return [(whose, item) for whose, item in batch if isinstance(whose, Future)]
