"""Transport of TensorRT-LLM with adapters: loaded when the engine lacks them, then asked again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest
from loop_thread import OnLoop
from scripted_server import PATIENCE_S
from scripted_triton import Request, ScriptedTriton, event

from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import ERROR, StepItem
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton.request_streams import RequestStreams

MISSING = "E1005 InvalidArgument: lora_task_id=7: not loaded: send lora_weights"
REQUEST = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=2), adapter="sql")


class Engine:
    """Answers as Triton does: a request of an adapter fails until that was loaded."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.prompts: list[list[int]] = []
        self.loaded = False
        self.error: str | None = None
        self.loading = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, request: Request) -> Iterator[Any]:
        if request.model == "lora_loader":
            self.loading.set()
            self.gate.wait(PATIENCE_S)
            self.loads.append(request.values["lora_name"])
            if self.error is not None:
                yield event(error=self.error)
                return
            self.loaded = True
            yield event(lora_task_id=7)
            return
        self.prompts.append(request.values["input_ids"])
        if request.values.get("lora_name") and not self.loaded:
            yield event(error=MISSING)
        else:
            yield from (event(output_ids=[5]), event(output_ids=[6]))


def until_end(inbox: Queue[StepItem]) -> list[StepItem]:
    items = [inbox.get(timeout=PATIENCE_S)]
    while not items[-1].end:
        items.append(inbox.get(timeout=PATIENCE_S))
    return items


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def streams(engine: Engine) -> Iterator[RequestStreams]:
    with ScriptedTriton(engine) as triton, triton.connected() as made:
        yield OnLoop(made)  # type: ignore[misc]


def ask(streams: RequestStreams, request: EngineRequest = REQUEST) -> list[StepItem]:
    inbox: Queue[StepItem] = Queue()
    streams.submit(request, {}, inbox.put)
    return until_end(inbox)


def test_requests_that_come_together_load_it_once(engine: Engine, streams: RequestStreams) -> None:
    engine.gate.clear()
    inboxes: list[Queue[StepItem]] = [Queue() for _ in range(8)]
    for inbox in inboxes:
        streams.submit(REQUEST, {}, inbox.put)
    engine.gate.set()
    for inbox in inboxes:
        items = until_end(inbox)
        assert [token for item in items for token in item.ids] == [5, 6], items
    assert engine.loads == ["sql"]


def test_what_keeps_it_from_being_loaded_is_the_requests_error(
    engine: Engine, streams: RequestStreams
) -> None:
    engine.error = "E1305 EngineIncompatible: rank 9"
    (item,) = ask(streams)
    assert (item.end, item.error) == (ERROR, engine.error)


def test_a_request_whose_adapter_is_never_loaded_ends_after_the_timeout(engine: Engine) -> None:
    engine.gate.clear()
    with ScriptedTriton(engine) as triton, triton.connected(0.3) as streams:
        (item,) = ask(OnLoop(streams))
        engine.gate.set()
    assert (item.end, (item.error or "")[:5]) == (ERROR, "E2101")
