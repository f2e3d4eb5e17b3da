"""A response's tensors outlive its sending, for the stub drops some of them without the GIL."""

from __future__ import annotations

import importlib
import sys
import weakref
from types import ModuleType

import pytest


class Tensor:
    pass


class Answer:
    def __init__(self) -> None:
        self.tensors = [Tensor(), Tensor()]

    def output_tensors(self) -> list[Tensor]:
        return list(self.tensors)


class Sender:
    """Drops all but the first tensor, as Triton's does where a client asked for that one."""

    dropped_the_last_reference = False
    flags = 0

    def send(self, answer: Answer, flags: int) -> None:
        last = weakref.ref(answer.tensors[1])
        del answer.tensors[1:]
        self.dropped_the_last_reference = last() is None
        self.flags = flags


def test_tensors_outlive_the_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "cog_triton.backend.python_backend"
    stand_in = "triton_python_backend_utils"
    monkeypatch.setitem(sys.modules, stand_in, ModuleType(stand_in))
    monkeypatch.delitem(sys.modules, name, raising=False)
    sender = Sender()
    importlib.import_module(name).send(sender, Answer(), 1)
    monkeypatch.delitem(sys.modules, name)
    assert not sender.dropped_the_last_reference
    assert sender.flags == 1
