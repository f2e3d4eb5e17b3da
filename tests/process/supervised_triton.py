"""A small Triton under its supervisor, and generations that are read from it on threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_tritonserver import FakeTritonServer
from generated_text import Texts
from local_parent import linked
from loop_thread import PORTAL, call
from scripted_triton import INPUTS, to_error
from small_tokenizers import byte_level

from cog_triton import errors
from cog_triton.engines import tensor_contract
from cog_triton.engines.base import EngineLimits
from cog_triton.engines.request import EngineRequest
from cog_triton.processes import restarts
from cog_triton.processes.parent_link import ParentLink
from cog_triton.serving import supervisor
from cog_triton.serving.admission import Admission
from cog_triton.serving.generate import TextGenerator
from cog_triton.serving.supervisor import Supervisor, SupervisorState
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.request_streams import RequestStreams
from cog_triton.triton.server import TritonClient

PATIENCE_S = 60
LIMITS = EngineLimits(max_input_len=100, max_seq_len=9999, max_batch_size=2, end_id=0, pad_id=0)


class Supervised:
    """A small Triton, its supervisor on the loop, and a generator through both."""

    def __init__(self, link: ParentLink, *, resumes: bool = False, **settings: Any) -> None:
        self.triton = FakeTritonServer(link.run_dir, link, **settings)
        self.failed = threading.Event()
        self.admission = Admission(2, 10, resumes=resumes)
        self.transport = RequestStreams(
            lambda: self.triton.server.grpc_target,
            60,
            to_error,
            tensor_contract.encode_request,
            INPUTS,
        )
        self.generator = TextGenerator(
            self.triton.settings,
            LIMITS,
            EngineTokenizer(byte_level()),
            self.transport,
            to_error,
            self.admission,
            on_failure=lambda: self.supervisor.check_engine(),
        )
        self.supervisor = call(
            Supervisor,
            self.triton.settings,
            self.triton.server,
            TritonClient(self.triton.settings),
            self.transport,
            self.generator.probe,
            self.admission,
            lambda _: self.failed.set(),
        )
        detection = self.supervisor._detection
        detection._period, detection._timeout = 0.05, 60.0  # a late probe would be a failure
        self.start = partial(call, self.supervisor.start)
        self.stop = partial(call, self.supervisor.stop)

    def stream(self, tokens: int = 5000) -> Stream:
        return Stream(self.generator, tokens)

    def flowing(self) -> Stream:
        """A stream that has begun."""
        stream = self.stream()
        assert stream.flowing.wait(PATIENCE_S)
        return stream

    def limit_probes(self, seconds: float) -> None:
        """Give probes of readiness so much time; returns when no earlier one runs any more."""
        begun = threading.Event()
        self.supervisor._detection._timeout = seconds
        self.transport.note_active = lambda _: begun.set()  # type: ignore[method-assign]
        assert begun.wait(PATIENCE_S)
        del self.transport.note_active

    def until(self, state: SupervisorState) -> None:
        until(lambda: self.supervisor.state is state)


class Stream(threading.Thread):
    """A generation that is read on a thread; `error` is what ended it."""

    def __init__(self, generator: TextGenerator, tokens: int) -> None:
        super().__init__()
        asked = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=tokens))
        self._texts = Texts(generator, generator.plan(asked))
        self.flowing = threading.Event()
        self.error: errors.CogTritonError | None = None
        self.text = ""
        self.start()

    def run(self) -> None:
        try:
            for text in self._texts:
                self.text += text
                self.flowing.set()
        except errors.CogTritonError as error:
            self.error = error

    def leave(self) -> None:
        """Cancel it, as its client's leaving does."""
        call(self._texts.generation.ticket.cancel)
        self.join(PATIENCE_S)

    def end(self) -> errors.CogTritonError | None:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.error


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


Make = Callable[..., Supervised]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes one; at the end of the test it is stopped."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)
    made: list[Supervised] = []

    with PORTAL.wrap_async_context_manager(linked(tmp_path)) as link:

        def one(**settings: Any) -> Supervised:
            made.append(Supervised(link, **settings))
            return made[-1]

        yield one
        for item in made:
            item.triton.recover()
            item.stop()
            assert not item.triton.server.root_pid


@pytest.fixture
def supervised(make: Make, monkeypatch: pytest.MonkeyPatch) -> Supervised:
    monkeypatch.setattr(supervisor, "STABLE_S", 0)
    return make()
