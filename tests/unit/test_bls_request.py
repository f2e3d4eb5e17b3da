"""Requests of a text model that fail: refused, or while they are answered."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from cog_triton.backend.answers import Part
from cog_triton.engines.request import TokenEvent
from cog_triton.engines.tensor_contract import check_parameters

FINAL = 1


class Sender:
    """Response sender of Triton's Python backend that keeps error texts."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def send(self, response: Any, flags: int = 0) -> None:
        self.sent.append((response, flags))


class Request:
    """Request of Triton's Python backend with a parameter that no model has."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def get_response_sender(self) -> Sender:
        return self._sender

    def inputs(self) -> list[Any]:
        return []

    def parameters(self) -> str:
        return json.dumps({"max_tokenz": 5})

    def requested_output_names(self) -> list[str]:
        return ["text_output"]

    def request_id(self) -> str:
        return ""


class TritonError(str):
    """Error of a response: its text."""

    INTERNAL, INVALID_ARG = range(2)

    def __new__(cls, text: str, code: int) -> TritonError:
        return super().__new__(cls, text)


@pytest.fixture
def engine_model() -> Iterator[Any]:
    stand_in: Any = ModuleType("triton_python_backend_utils")
    stand_in.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    stand_in.TritonError = TritonError
    stand_in.InferenceResponse = lambda error: error
    names = [f"cog_triton.backend.{name}" for name in ("engine_model", "python_backend")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stand_in.__name__, stand_in)
        for name in names:  # an import finds either
            patch.delitem(sys.modules, name, raising=False)
            patch.delattr(name, raising=False)
        yield importlib.import_module(names[0])
        for name in names:
            sys.modules.pop(name, None)


def test_refused_request_leaves_no_reference_cycle(engine_model: Any) -> None:
    def parse(asked: Any) -> Any:
        check_parameters(asked.parameters, ["max_tokens"])

    sender = Sender()
    model = SimpleNamespace(name="ensemble", parse=parse, active=set(), changed=lambda: None)
    request = engine_model._ClientRequest(model, Request(sender), {})
    freed = weakref.ref(request)
    gc.disable()
    try:
        request.run()
        del request
        assert freed() is None
    finally:
        gc.enable()
    [(text, flags)] = sender.sent
    assert "max_tokenz" in text
    assert flags == FINAL


def test_a_request_whose_answer_fails_is_ended_and_its_engine_stopped(engine_model: Any) -> None:
    class Broken(Part):
        def feed(self, event: Any) -> Any:
            raise ZeroDivisionError

    class Engine:
        emits: ClassVar[dict[int, Any]] = {}
        cancelled: ClassVar[list[int]] = []

        def submit(self, handle: int, request: Any, emit: Any, prompt: Any) -> None:
            self.emits[handle] = emit

        def cancel(self, handle: int) -> None:
            self.cancelled.append(handle)

    sender, engine = Sender(), Engine()
    model = SimpleNamespace(name="ensemble", active=set(), changed=lambda: None, engine=engine)
    model.numbers, model.parse = itertools.count(1), lambda asked: [Broken(None), Broken(None)]
    model.failure = lambda event: None
    engine_model._ClientRequest(model, Request(sender), {}).run()
    assert len(model.active) == 1
    for number in (1, 2):
        engine.emits[number](TokenEvent([5], []))
    [(text, flags)] = sender.sent
    assert "E2100" in text
    assert flags == FINAL
    assert engine.cancelled == [1, 2]
    assert not model.active
