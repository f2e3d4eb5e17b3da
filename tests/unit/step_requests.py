"""Requests on a step stream of scripted steps, and the items that they get."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
from scripted_server import PATIENCE_S
from scripted_steps import ScriptedSteps

from cog_triton.engines import step_items, tensor_contract
from cog_triton.engines.generate_stream import to_error
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import StepItem
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton.step_stream import StepStream
from cog_triton.triton.token_transport import Submission

REQUEST = EngineRequest(input_ids=[5, 300, 70_000], sampling=SamplingParams(max_tokens=9))


class Running:
    """A submitted request and the items it got."""

    def __init__(self, stream: StepStream, **engine_inputs: Any) -> None:
        self.items: list[StepItem] = []
        self.ended = Event()
        self.submission: Submission = stream.submit(REQUEST, engine_inputs, self._put)

    def _put(self, item: StepItem) -> None:
        assert not self.ended.is_set(), "an item after the end"
        self.items.append(item)
        if item.end:
            self.ended.set()

    @property
    def ids(self) -> list[int]:
        return [token for item in self.items for token in item.ids]

    def wait(self) -> StepItem:
        """The last item."""
        assert self.ended.wait(2 * PATIENCE_S)
        return self.items[-1]

    def error(self) -> str:
        item = self.wait()
        assert item.end == step_items.ERROR
        return str(item.error)


def made(handle: int, offset: int, *ids: int, end: int = 0) -> StepItem:
    return StepItem(handle, 0, offset, list(ids), [], end)


@pytest.fixture
def triton() -> Iterator[ScriptedSteps]:
    with ScriptedSteps() as triton:
        yield triton


def connect(triton: ScriptedSteps, timeout: float = 60) -> StepStream:
    return StepStream(triton.url, timeout, to_error, tensor_contract.encode_request)


@pytest.fixture
def stream(triton: ScriptedSteps) -> Iterator[StepStream]:
    stream = connect(triton)
    stream.open()
    yield stream
    stream.close()
