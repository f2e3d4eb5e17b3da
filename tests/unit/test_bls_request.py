"""A refused request of a text model: its prompt is freed at once, not at a later GC."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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
