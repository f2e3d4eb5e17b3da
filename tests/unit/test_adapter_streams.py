"""Transport of TensorRT-LLM with adapters: loaded when the engine lacks them, then asked again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest
from scripted_server import PATIENCE_S, Request, event, serving, stream

from cog_triton.engines import tensor_contract
from cog_triton.engines.generate_stream import to_error
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
        self.requests = 0
        self.loaded = False
        self.error: str | None = None
        self.loading = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, request: Request) -> Iterator[Any]:
        body = json.loads(request.body)
        if "lora_loader" in request.path:
            self.loading.set()
            self.gate.wait(PATIENCE_S)
            self.loads.append(body["lora_name"])
            if self.error is not None:
                yield from stream(event(error=self.error), status="400 Bad Request")
                return
            self.loaded = True
            yield from stream(event(lora_task_id=7))
            return
        self.requests += 1
        if body.get("lora_name") and not self.loaded:
            yield from stream(event(error=MISSING))
        else:
            yield from stream(event(output_ids=[5]), event(output_ids=[6]))


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
    with serving(engine) as triton:
        made = RequestStreams(triton.url, 2 * PATIENCE_S, to_error, tensor_contract.encode_request)
        yield made
        made.close()


def ask(streams: RequestStreams, request: EngineRequest = REQUEST) -> list[StepItem]:
    inbox: Queue[StepItem] = Queue()
    streams.submit(request, {}, inbox.put)
    return until_end(inbox)


def test_an_adapter_is_loaded_when_the_engine_lacks_it(
    engine: Engine, streams: RequestStreams
) -> None:
    for _ in range(3):
        assert [token for item in ask(streams) for token in item.ids] == [5, 6]
    assert (engine.loads, engine.requests) == (["sql"], 4)
    engine.loaded = False  # evicted, or Triton was started again
    assert [token for item in ask(streams) for token in item.ids] == [5, 6]
    assert engine.loads == ["sql", "sql"]


def test_requests_that_come_together_load_it_once(engine: Engine, streams: RequestStreams) -> None:
    engine.gate.clear()
    inboxes: list[Queue[StepItem]] = [Queue() for _ in range(8)]
    for inbox in inboxes:
        streams.submit(REQUEST, {}, inbox.put)
    engine.gate.set()
    for inbox in inboxes:
        assert [token for item in until_end(inbox) for token in item.ids] == [5, 6]
    assert engine.loads == ["sql"]


def test_what_keeps_it_from_being_loaded_is_the_requests_error(
    engine: Engine, streams: RequestStreams
) -> None:
    engine.error = "E1305 EngineIncompatible: rank 9"
    (item,) = ask(streams)
    assert (item.end, item.error) == (ERROR, engine.error)


def test_a_cancelled_request_is_not_sent_again(engine: Engine, streams: RequestStreams) -> None:
    engine.gate.clear()
    inbox: Queue[StepItem] = Queue()
    submission = streams.submit(REQUEST, {}, inbox.put)
    assert engine.loading.wait(PATIENCE_S)
    submission.cancel()
    engine.gate.set()
    (thread,) = [each for each in threading.enumerate() if each.name == "adapter"]
    thread.join(PATIENCE_S)
    assert [token for item in ask(streams) for token in item.ids] == [5, 6]
    assert engine.requests == 2
    assert inbox.empty()


def test_requests_of_the_base_model_load_nothing(engine: Engine, streams: RequestStreams) -> None:
    plain = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=2))
    assert [token for item in ask(streams, plain) for token in item.ids] == [5, 6]
    assert engine.loads == []
