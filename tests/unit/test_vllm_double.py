"""Double of vLLM: has the names, fields and signatures recorded from the real one."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_engines import DOUBLES

from cog_triton.engines.vllm.argument_types import convert, known_versions, minor_version, types_of
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
    assert len(found) == 11


def test_version_matches_the_record(record: Any) -> None:
    assert importlib.import_module("vllm").__version__ == record["source"]["version"]


def test_the_tested_version_is_recorded() -> None:
    minors = [minor_version(RECORD["source"]["version"])]
    assert [row["minor"] for row in known_versions()] == minors


@pytest.mark.parametrize(
    ("version", "exact"),
    [("0.33.1+cu130", True), ("0.34.0rc1", False), ("0.3.3", False), (None, True)],
)
def test_the_record_is_exact_for_its_minor_version(version: str | None, exact: bool) -> None:
    types = types_of(version)
    assert types.record is RECORD
    assert types.version == (version or RECORD["source"]["version"])
    assert types.exact is exact


@pytest.mark.parametrize(
    ("value", "kinds", "converted"),
    [
        ("0.1", ["float"], 0.1),
        (1, ["float"], 1.0),
        ("100", ["int", "null"], 100),
        (None, ["int", "null"], None),
        ("True", ["bool"], True),
        ("false", ["bool"], False),
        ('{"json": "{}"}', ["dict", "null"], {"json": "{}"}),
        ('["a"]', ["list", "null", "str"], '["a"]'),
        (["a"], ["list", "null", "str"], ["a"]),
        ("auto", ["=auto", "=half"], "auto"),
        (16, ["=8", "=16"], 16),
        ("12", ["str"], "12"),
    ],
)
def test_values_are_converted_to_the_recorded_types(
    value: Any, kinds: list[str], converted: Any
) -> None:
    made = convert(value, kinds)
    assert made == converted
    assert type(made) is type(converted)


@pytest.mark.parametrize(
    ("value", "kinds", "rule"),
    [
        ("warm", ["float"], "must be a number"),
        (True, ["int"], "must be a whole number"),
        (1.5, ["int", "null"], "must be a whole number or null"),
        (None, ["str"], "must be text"),
        (1, ["bool"], "must be true or false"),
        ("bf16", ["=auto", "=half"], "must be auto or half"),
        (12, ["=8", "=16"], "must be 8 or 16"),
        ("[1", ["list"], "must be a list"),
        ({}, ["str", "null"], "must be text or null"),
    ],
)
def test_values_of_other_types_are_refused(value: Any, kinds: list[str], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{rule}$"):
        convert(value, kinds)
