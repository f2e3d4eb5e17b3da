"""Parsers of vLLM, borrowed: answers are parsed in a child process, in vLLM's own Python.

Deltas of all streams cross together, text and token ids, and what they complete comes back. Of a
parser that raises, runs on or eats memory only its own request fails (E2114). If the child dies,
or is killed since it does not answer, its streams fail, and the next request starts another.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from cog_triton.engines.base import EngineFamily
from cog_triton.engines.vllm import parser_child
from cog_triton.errors import InvalidArgument, ParserFailed, TritonStartFailed
from cog_triton.ipc import child
from cog_triton.ipc.child import PythonChild
from cog_triton.serving.openai.parsers.call_parser import (
    PYTHONIC,
    UNKNOWN,
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
    format_of,
)
from cog_triton.settings import Settings
from cog_triton.settings.request_defaults import PREFIX
from cog_triton.system import isolated_python
from cog_triton.text.tokenizer import EngineTokenizer

_log = logging.getLogger(__name__)

CPU_S = 2.0
MEMORY_BYTES = 1 << 30
_START_S = 300.0
_ANSWER_FACTOR = 15
"""How many times the CPU time of a step the child has for an answer."""
_STOP_S = 2.0
_MOST_ITEMS = 512
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_DELTAS: Mapping[str, Callable[..., Delta]] = {
    "content": Content,
    "reasoning": Reasoning,
    "call": CallStart,
    "arguments": CallArguments,
}
_PASSED = ("HOME", "TIKTOKEN_ENCODINGS_BASE", "TIKTOKEN_RS_CACHE_DIR")


class RequestPlan(NamedTuple):
    """What vLLM's parser makes of a request: `visible` says whether special tokens are text.

    `tag` is the structural tag that guides the answer, None without one; `json` whether vLLM
    itself has calls that are forced written as JSON.
    """

    visible: bool
    tag: str | None
    json: bool


class BorrowedStream:
    """Stream of one answer: text and token ids in, and what came back of them.

    As a parser of reasoning it is the first of an `AnswerParser`, with deltas of calls as well.
    """

    def __init__(self, parsers: BorrowedParsers, spec: Mapping[str, Any]) -> None:
        """`spec` are fields of vLLM's request, and `prompt_token_ids`."""
        self._parsers = parsers
        self._spec = spec
        self._arrived: deque[Delta] = deque()
        self._sent = self._answered = 0
        self._number = 0
        self.failure: ParserFailed | None = None
        self._on_result: Callable[[], object] = lambda: None

    def __deepcopy__(self, memo: object) -> BorrowedStream:
        return BorrowedStream(self._parsers, self._spec)

    def begin(self, prompt: Sequence[int], on_result: Callable[[], object]) -> None:
        """Open it for an answer to a prompt.

        `on_result` is called on another thread once there is something new.
        """
        self._on_result = on_result
        self._number = next(self._parsers.numbers)
        self._ask("open", {**self._spec, "prompt_token_ids": list(prompt)})

    def send(self, text: str, ids: Sequence[int], *, finished: bool) -> None:
        """Have new text and token ids parsed."""
        self._ask("feed", text, ids, finished)

    def send_whole(self, text: str, ids: Sequence[int]) -> None:
        """Have a whole answer parsed, in place of what `send` sends."""
        self._ask("whole", text, ids)

    def close(self) -> None:
        """Forget it."""
        self._on_result = lambda: None
        self._ask("close")

    def _ask(self, word: str, *given: Any) -> None:
        self._sent += 1
        self._parsers.put(self.take, [word, self._number, *given])

    @property
    def has_results(self) -> bool:
        """Whether there is something new: deltas, or that all of them are there."""
        return bool(self._arrived) or self.failure is not None

    @property
    def waits(self) -> bool:
        """Whether results are still to come."""
        return self.failure is None and self._answered < self._sent

    def feed(self, text: str) -> list[Delta]:
        """The deltas that have come; raises E2114 once the parser has failed."""
        if self.failure is not None:
            raise self.failure
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def finish(self) -> list[Delta]:
        """See `feed`."""
        return self.feed("")

    def take(self, found: Any) -> None:
        """Take the next result, on the thread of the child: deltas, or an error."""
        self._answered += 1
        if isinstance(found, str):
            found = self._parsers.failed(found)
        if isinstance(found, ParserFailed):
            self.failure = self.failure or found
        else:
            self._arrived += (_DELTAS[kind](*values) for kind, *values in found or ())
        self._on_result()


_Asked = tuple[Callable[[Any], object], Sequence[Any]]
"""Receiver of the result of an item, and the item: a word, a stream's number, and more."""


class BorrowedParsers:
    """vLLM's parsers of one model, in a child of this process; thread-safe."""

    def __init__(
        self,
        python: Path,
        links: Path,
        tokenizer_dir: Path,
        names: tuple[str, str],
        *,
        types: Sequence[str] = (),
        cpu_seconds: float = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Start the child, which takes as long as vLLM takes to be imported.

        `names` are those of the parsers of tool calls and of reasoning, blank for none and `auto`
        for that of the first of `types`. `links` is a directory for what leads `python` to this
        package. Limits are CPU seconds of a step of an answer, and bytes of memory.

        Raises:
            InvalidArgument: vLLM has no parser of that name.
            TritonStartFailed: vLLM cannot be imported, or its parser not be made.
        """
        found = isolated_python.environment_of(str(python), links)
        variables = {"PATH": found["PATH"], "PYTHONPATH": found["PYTHONPATH"], **_QUIET}
        variables |= {name: os.environ[name] for name in _PASSED if name in os.environ}
        self._python, self._variables = python, variables
        self._answer_s = _ANSWER_FACTOR * cpu_seconds
        self._arguments = cpu_seconds, memory_bytes, str(tokenizer_dir), names, types
        self._queue: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._open: dict[int, Callable[[Any], object]] = {}
        """Receivers of results, of the streams that are open in the child."""
        self.numbers = count(1)
        """Of streams to come."""
        self._closed = False
        self.version = self.tool = self.reasoning = ""
        self._child = self._start()
        self._thread = threading.Thread(target=self._run, name="parsers", daemon=True)
        self._thread.start()

    @property
    def title(self) -> str:
        """Names of the parsers, for errors and the log."""
        return " and ".join(dict.fromkeys(filter(None, (self.tool, self.reasoning))))

    def plan(self, spec: Mapping[str, Any]) -> RequestPlan:
        """What a request needs, by fields of vLLM's; blocks. Raises E1005 if vLLM refuses it."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put(answer.put, ["plan", 0, spec])
        try:
            found = answer.get(timeout=_START_S)
        except queue.Empty:
            found = self.failed("it does not answer")
        if isinstance(found, ParserFailed):
            raise found
        if isinstance(found, str):
            raise InvalidArgument(f"tools: vLLM's parser {self.title} does not take them: {found}")
        return RequestPlan(*found)

    def failed(self, why: str) -> ParserFailed:
        """The error of an answer that is not parsed."""
        return ParserFailed(f"vLLM's parser {self.title} fails: {why}")

    def put(self, take: Callable[[Any], object], item: Sequence[Any]) -> None:
        """Have an item carried out, after those before it; `take` is called with the result."""
        self._queue.put((take, item))

    def close(self) -> None:
        """End the child."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(_STOP_S)
        self._child.close()

    def _start(self) -> PythonChild:
        """A child that has loaded vLLM; raises as the constructor."""
        try:
            made = self._process()
            try:
                loaded = child.call(made, parser_child.load, *self._arguments)
            except BaseException:
                made.close()
                raise
        except (OSError, RuntimeError) as error:
            raise TritonStartFailed(
                f"vLLM's parsers cannot be used, in {self._python}: {error}"
            ) from error
        self.version, self.tool, self.reasoning = map(loaded.get, ("version", "tool", "reasoning"))
        made.connection.settimeout(self._answer_s)
        return made

    def _process(self) -> PythonChild:
        """A process that takes calls; raises OSError."""
        return PythonChild(
            parser_child.__name__,
            timeout=_START_S,
            python=self._python,
            variables=self._variables,
        )

    def _run(self) -> None:
        """Carry out what is asked, all that has come at once; on a thread of its own."""
        while (first := self._queue.get()) is not None and not self._closed:
            batch = [first]
            while len(batch) < _MOST_ITEMS and not self._queue.empty():
                if (more := self._queue.get()) is None:
                    self._queue.put(None)
                    break
                batch.append(more)
            try:
                if not self._child.alive:
                    self._fail(())
                    self._child = self._start()
                self._carry_out(batch)
            except Exception as error:  # noqa: BLE001 - answers wait for this thread
                self._fail(batch, error)

    def _carry_out(self, batch: Sequence[_Asked]) -> None:
        self._open |= {item[1]: take for take, item in batch if item[0] == "open"}
        while batch:
            results = child.call(self._child, parser_child.parse, [item for _, item in batch])
            for (take, item), found in zip(batch, results, strict=False):
                take(found)
                if item[0] == "close":
                    self._open.pop(item[1], None)
            batch = batch[len(results) :]

    def _fail(self, batch: Sequence[_Asked], error: Exception | None = None) -> None:
        """End the child, if it has not, and fail all of its streams and of a batch."""
        code = self._child.close()
        hangs = isinstance(error, TimeoutError)
        why = "it does not end" if hangs else f"its process ended with {code}"
        _log.warning("vLLM's parsers: %s; %d answers fail: %s", why, len(self._open), error)
        takes = (*self._open.values(), *(take for take, _ in batch))
        self._open = {}
        for take in takes:
            take(self.failed(why))


def borrow(
    settings: Settings, family: EngineFamily, tokenizer: EngineTokenizer, links: Path
) -> BorrowedParsers | None:
    """Parsers of vLLM that the settings name, or that its engine's model needs; None without.

    Raises E1005 for names that do not go together or that vLLM does not know, and E2106.
    """
    tool, reasoning = (
        name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""
        for name in (settings.tool_call_parser, settings.reasoning_parser)
    )
    named = bool(tool or reasoning)
    if tool and settings.reasoning_parser not in ("auto", "none") and not reasoning:
        raise InvalidArgument(
            f"REASONING_PARSER={settings.reasoning_parser}: not beside TOOL_CALL_PARSER={PREFIX}"
            f"{tool}; name one of vLLM's, or none"
        )
    form = format_of(tokenizer)
    automatic = family.parses and settings.tool_call_parser == "auto" and not named
    if automatic and form in (PYTHONIC, UNKNOWN):
        tool = parser_child.AUTO
    if not (tool or reasoning):
        return None
    if tool and settings.reasoning_parser == "auto":
        reasoning = parser_child.AUTO
    config = family.model_dir / "config.json"
    known = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    types = [str(known.get("model_type", "")), *([form] if form == PYTHONIC else [])]
    python = settings.cog_triton_vllm_python or Path(sys.executable)
    try:
        found = BorrowedParsers(python, links, family.tokenizer_dir, (tool, reasoning), types=types)
    except TritonStartFailed as error:
        if named:
            raise
        _log.warning("%s", error)
        return None
    if not (found.tool or found.reasoning):
        found.close()
        if named:
            raise InvalidArgument(
                f"TOOL_CALL_PARSER={PREFIX}{parser_child.AUTO}: vLLM {found.version} has no parser"
                f" by the model's type {known.get('model_type')!r}; name one"
            )
        return None
    _log.info("answers are parsed by vLLM %s, as %s", found.version, found.title)
    return found
