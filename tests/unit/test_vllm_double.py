"""Double of vLLM: has the names, fields and signatures recorded from the real one."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_engines import DOUBLES

from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.request_import import named, written

RECORD = types_of().record


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The record, while the double can be imported."""
    monkeypatch.syspath_prepend(str(DOUBLES))
    yield RECORD
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("section", ["signatures", "hooks"])
def test_signatures_match_the_record(record: Any, section: str) -> None:
    for name, parameters in record[section].items():
        assert written(named(name)) == parameters, name


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("engine_args", "vllm.engine.arg_utils:AsyncEngineArgs"),
        ("sampling_params", "vllm.sampling_params:SamplingParams"),
        ("structured_outputs", "vllm.sampling_params:StructuredOutputsParams"),
        ("repetition_detection", "vllm.sampling_params:RepetitionDetectionParams"),
        ("lora_request", "vllm.lora.request:LoRARequest"),
        ("completion_output", "vllm.outputs:CompletionOutput"),
    ],
)
def test_fields_match_the_record(record: Any, section: str, name: str) -> None:
    module, _, cls = name.partition(":")
    fields = dataclasses.fields(getattr(importlib.import_module(module), cls))
    assert {f.name for f in fields if f.name[0] != "_"} == set(record[section])


def test_exceptions_match_the_record(record: Any) -> None:
    found = {}
    for module in ("vllm.exceptions", "vllm.v1.engine.exceptions"):
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, type) and value.__module__ == module:
                found[f"{module}:{name}"] = [base.__name__ for base in value.__bases__]
    assert found.items() <= record["exceptions"].items()
    assert len(found) == 10


@pytest.mark.parametrize(
    ("version", "exact"),
    [("0.33.1+cu130", True), ("0.34.0rc1", False), ("0.3.3", False), (None, True)],
)
def test_the_record_is_exact_for_its_minor_version(version: str | None, exact: bool) -> None:
    types = types_of(version)
    assert types.record is RECORD
    assert types.version == (version or RECORD["source"]["version"])
    assert types.exact is exact
