"""A transport whose engine dies when it is told to, and generations over it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from generated_text import Texts
from loop_thread import OnLoop, call
from scripted_server import PATIENCE_S, wait_until
from small_tokenizers import byte_level

from cog_triton import errors
from cog_triton.engines.base import EngineLimits, ResumeRules
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import StepItem
from cog_triton.errors import CogTritonError, TritonUnavailable, TritonUnknownError
from cog_triton.serving.admission import Admission
from cog_triton.serving.generate import TextGenerator
from cog_triton.serving.generation import GenerationResult
from cog_triton.settings import load_settings
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.infer_stream import Put, failure

TOKENIZER = EngineTokenizer(byte_level())
GONE = TritonUnavailable("the engine's process has ended; try again later")


class Submission:
    replica = 0

    def __init__(self, request: EngineRequest, put: Put) -> None:
        self.request = request
        self.put = partial(call, put)
        self.sent = 0
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def make(self, text: str, end: int = 0, *, lost: int = 0) -> None:
        """Make the tokens of a text, at an offset that shows `lost` ones."""
        ids = TOKENIZER.encode(text) if text else []
        width = int(self.request.return_log_probs)
        self.put(StepItem(1, 0, self.sent + lost, ids, [-1.0] * len(ids) * width, end, None, width))
        self.sent += len(ids)

    def die(self) -> None:
        self.put(failure(1, GONE))


class Engine:
    """Transport to an engine that does what a test says; `down` refuses requests."""

    last_token_at = 0.0

    def __init__(self) -> None:
        self.submissions: list[Submission] = []
        self.down = False

    async def open(self, generations: Mapping[int, int]) -> None: ...
    async def disconnect(self) -> None: ...

    def submit(self, request: EngineRequest, inputs: Mapping[str, Any], put: Put) -> Submission:
        if self.down:
            raise GONE
        self.submissions.append(Submission(request, put))
        return self.submissions[-1]

    def get(self, number: int) -> Submission:
        wait_until(lambda: len(self.submissions) > number)
        return self.submissions[number]


class World:
    """A generator with one engine; `checks` counts the engine checks that were asked for."""

    def __init__(self, slots: int = 8, *, resumes: bool = True, **rules: Any) -> None:
        self.engine = Engine()
        admission = Admission(slots, 8, resumes=resumes)
        self.admission = OnLoop(admission)
        self.checks = 0
        self.generator = TextGenerator(
            load_settings(),
            EngineLimits(
                max_input_len=90, max_seq_len=200, max_batch_size=8, end_id=None, pad_id=None
            ),
            TOKENIZER,
            self.engine,
            lambda text: errors.from_text(text) or TritonUnknownError(text),
            admission,
            on_failure=self._check,
            resume_rules=ResumeRules(**rules),
        )

    def _check(self) -> None:
        self.checks += 1

    def start(
        self,
        prompt: Sequence[int] = (1, 2),
        stops: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Running:
        given = SamplingParams(**{"max_tokens": 50, "seed": 3, **(sampling or {})})
        request = self.generator.plan(
            EngineRequest(input_ids=list(prompt), sampling=given, **fields), stops
        )
        return Running(Texts(self.generator, request))

    def die(self) -> None:
        """The engine dies, and the supervisor notices."""
        for submission in self.engine.submissions:
            submission.die()
        self.admission.pause(TritonUnavailable("Triton is being restarted, try again in 2 s"))


class Running:
    """A generation on a thread of its own."""

    def __init__(self, texts: Texts) -> None:
        self.generation = texts.generation
        self.texts: list[str] = []
        self._future: Future[None] = Future()
        threading.Thread(target=self._read, args=[texts], daemon=True).start()

    def _read(self, texts: Texts) -> None:
        try:
            for text in texts:
                self.texts.append(text)
        except CogTritonError as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    @property
    def result(self) -> GenerationResult:
        return self.generation.result

    def until_told(self, text: str) -> None:
        wait_until(lambda: "".join(self.texts) == text)

    def until_waiting(self) -> None:
        wait_until(lambda: self.generation.interrupted and self.generation._submission is None)

    def text(self) -> str:
        self._future.result(PATIENCE_S)
        return "".join(self.texts)

    def error(self) -> BaseException | None:
        return self._future.exception(PATIENCE_S)
