"""Double of vLLM: has the names, fields and signatures recorded from the real one."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_engines import DOUBLES

from cog_triton.engines.vllm.argument_types import RECORD, VERSION, convert
from cog_triton.engines.vllm.model_arguments import REPLACED
from cog_triton.engines.vllm.sampling_arguments import REPLACED as REPLACED_SAMPLING


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(DOUBLES))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def written(parameters: Any) -> list[str]:
    """Parameters as ``scripts/record_vllm.py`` writes them."""
    names = []
    keyword_only = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            names.append("*")
        optional = parameter.default is not parameter.empty
        mark = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        names.append(mark + parameter.name + "=" * optional)
    return names


@pytest.mark.parametrize("name", RECORD["signatures"])
def test_signatures_match_the_record(name: str) -> None:
    module, _, path = name.partition(":")
    function: Any = importlib.import_module(module)
    for part in path.split("."):
        function = inspect.getattr_static(function, part)
    function = getattr(function, "__func__", function)
    assert written(inspect.signature(function).parameters.values()) == RECORD["signatures"][name]


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
def test_fields_match_the_record(section: str, name: str) -> None:
    module, _, cls = name.partition(":")
    fields = dataclasses.fields(getattr(importlib.import_module(module), cls))
    assert {f.name for f in fields if f.name[0] != "_"} == set(RECORD[section])


def test_version_matches_the_record() -> None:
    assert importlib.import_module("vllm").__version__ == VERSION


def test_replaced_arguments_are_not_in_the_record() -> None:
    assert not REPLACED.keys() & RECORD["engine_args"].keys()
    assert not REPLACED_SAMPLING.keys() & RECORD["sampling_params"].keys()


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
