"""What of a body reaches Triton: the table of docs/security.md, "What passes to Triton"."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from small_front import TENSORS

from cog_triton.errors import InvalidArgument
from cog_triton.front.json_body import JSONLimits, Numbers
from cog_triton.front.triton_schema import (
    rewritten_generation,
    rewritten_index,
    rewritten_inference,
)

LIMITS = JSONLimits(numbers=Numbers.FREE)


def generated(**values: Any) -> Any:
    return json.loads(rewritten_generation(json.dumps(values).encode(), LIMITS, TENSORS))


def inferred(binary: bytes = b"", **values: Any) -> Any:
    head = json.dumps(values).encode()
    length = b"%d" % len(head) if binary else b""
    body, size = rewritten_inference(head + binary, length, LIMITS, TENSORS)
    assert body[len(body) if size is None else size :] == binary
    return json.loads(body[:size])


def tensor(name: str = "text_input", **values: Any) -> dict[str, Any]:
    return {"name": name, "datatype": TENSORS.inputs.get(name, "?"), "shape": [1, 1], **values}


def binary(size: Any, name: str = "text_input", **values: Any) -> dict[str, Any]:
    return tensor(name, parameters={"binary_data_size": size}, **values)


def output(**values: Any) -> dict[str, Any]:
    return {"outputs": [{"name": "text_output", **values}]}


TEXT = tensor(data=["a"])
MANY = {f"a{i}": 0.5 for i in range(32)}
SHAPE = ": must be 1 to 16 whole numbers, with a product of 2147483647 at most"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"text_input": "a", "max_tokens": 3, "seed": 2**64 - 1, "stream": True, "temperature": 1},
        {"text_input": ["a", "b"], "temperature": [0.5, 1], "input_ids": []},
        {"id": "a", "parameters": {"max_tokens": 3, "top_k": 4, "stop": "x", "Streaming": False}},
        {"sequence_id": 2**64 - 1, "sequence_start": True, "sequence_end": False, "a": -(2**63)},
        {"sequence_id": "abc", "priority": 1, "timeout": 1000, "binary_data_output": False},
        {"timeout": 2**63 - 1, "parameters": {"timeout": 1, "id": "a"}, "a": "b" * 65536},
        {**MANY, "parameters": MANY},
        {"id": "a" * 1024, "max_tokens": [-(2**31), 2**31 - 1], "temperature": -3.4e38},
    ],
)
def test_what_released_clients_send_is_passed_on_as_it_is(values: dict[str, Any]) -> None:
    assert generated(**values) == values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"text_input": [["a"], "b"]}, "text_input=['a']: must be BYTES"),
        ({"max_tokens": 2.0}, "max_tokens=2.0: must be INT32"),
        ({"max_tokens": True}, "max_tokens=True: must be INT32"),
        ({"parameters": {"max_tokens": -(2**31) - 1}}, "max_tokens=-2147483649: beyond INT32"),
        ({"seed": [1, -1]}, "seed=-1: beyond UINT64"),
        ({"seed": [2**64, 1]}, "seed=18446744073709551616: beyond UINT64"),
        ({"stream": 1}, "stream=1: must be BOOL"),
        ({"temperature": 1e39}, "temperature=1e+39: beyond FP32"),
        ({"half": 1}, "half: FP16 must be a binary tensor of infer"),
        ({"outputs": None}, "outputs=None: must be text of 65536"),
        ({"parameters": "x"}, "parameters='x': must be an object"),
        ({"parameters": {"a": {}}}, "a={}: must be text of 65536 characters at most, a number, tr"),
        ({"a": None}, "a=None: must be text"),
        ({"a": 2**63}, "a=9223372036854775808: must be text"),
        ({"a": "b" * 65537}, f"a='{'b' * 76}...: must be text of 65536"),
        ({"a b": 1}, "a b: no parameter of clients: binary_data_output, sequence_end, "),
        ({"\x1b[31m": 1}, r"\x1b[31m: no parameter of clients"),
        ({"triton_enable_empty_final_response": True}, "response: no parameter of clients"),
        ({"classification": 1}, "classification: no parameter of clients"),
        ({"shared_memory_region": "a"}, "shared_memory_region: no parameter of clients"),
        ({"binary_data_size": 1}, "binary_data_size: no parameter of clients"),
        ({"id": 5}, "id=5: must be text of 1024 characters at most"),
        ({"priority": -1}, "priority=-1: must be from 0 to 4294967295"),
        ({"priority": 2**32}, "priority=4294967296: must be from 0 to 4294967295"),
        ({"timeout": 2**63}, "timeout=9223372036854775808: must be from 0"),
        ({"sequence_start": 1}, "sequence_start=1: must be true or false"),
        ({"sequence_id": True}, "sequence_id=True: must be from 0"),
        # Triton reads both levels, each with all its names.
        ({"parameters": {"parameters": {"classification": [1]}}}, "'classification': [1]}: must"),
        ({"parameters": {"id": [1]}}, "id=[1]: must be text"),
        ({"priority": 1, "parameters": {"priority": -1}}, "priority=-1: must be from 0"),
        ({"priority": -1, "parameters": {"priority": 1}}, "priority=-1: must be from 0"),
        ({"a": 1, "parameters": {"a": {"b": [1]}}}, "a={'b': [1]}: must be text"),
        ({"a": {}, "parameters": {"a": 1}}, "a={}: must be text"),
        ({**MANY, "parameters": {**MANY, "b": 1}}, "parameters: 65; 64 at most"),
    ],
)
def test_what_is_not_allowed_to_generate_is_refused_by_name(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        generated(**values)


def test_null_is_as_good_as_absent() -> None:
    assert generated(text_input="x", id=None, parameters=None) == {"text_input": "x"}
    bare = {"inputs": [TEXT], "outputs": [{"name": "text_output"}]}
    nulls = {name: [{**one, "parameters": None} for one in bare[name]] for name in bare}
    assert inferred(**nulls, id=None, parameters=None) == inferred(**bare)
    assert inferred(inputs=[TEXT], outputs=None) == inferred(inputs=[TEXT])


def test_nested_data_is_made_flat() -> None:
    """Triton counts the outer list's items only, and reads those of the inner ones."""
    values = inferred(inputs=[tensor("input_ids", shape=[2, 2], data=[[1, 2], [3, 4]])])
    assert values["inputs"][0]["data"] == [1, 2, 3, 4]
    assert generated(input_ids=[[1, 2, 3]]) == {"input_ids": [1, 2, 3]}
    assert generated(parameters={"input_ids": [[1]]}) == {"parameters": {"input_ids": [1]}}


@pytest.mark.parametrize(
    "values",
    [
        {"inputs": [TEXT], "outputs": [{"name": "text_output"}], "id": "7"},
        {
            "inputs": [tensor(data=["a"], shape=[1] * 16)],
            "outputs": [{"name": "output_ids", "parameters": {"binary_data": True}}],
            "parameters": {"binary_data_output": True, "sequence_id": 3, "Streaming": True},
        },
        {"inputs": [tensor("input_ids", shape=[1, 0], data=[])]},
        {"binary": b"abcdefgh", "inputs": [binary(8)]},
        {"binary": bytes(4), "inputs": [binary(4, "half", shape=[2])]},
        {"binary": b"abc", "inputs": [binary(1, "bytes"), TEXT, binary(2, "mask", shape=[2])]},
    ],
)
def test_what_tritonclient_infers_with_is_passed_on_as_it_is(values: dict[str, Any]) -> None:
    assert inferred(**values) == {name: values[name] for name in values if name != "binary"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parameters": 3}, "parameters=3: must be an object"),
        ({"parameters": {"classification": 1}}, "classification: no parameter of clients"),
        ({"inputs": None}, "inputs=None: must be a list of objects"),
        ({"outputs": [1]}, "outputs=[1]: must be a list of objects"),
        ([TEXT, TEXT], "inputs: each must have a name of its own"),
        ([{"name": ["a"]}], "inputs: each must have a name of its own"),
        ([tensor(dat=["a"])], "text_input: dat: not allowed; did you mean 'data'?"),
        ([tensor(datatype="INT32", data=[1])], "datatype='INT32': must be 'BYTES'"),
        ([{"name": "text_input", "shape": [1]}], "text_input: datatype=None: must be 'BYTES'"),
        ([{"name": "text_input", "datatype": "BYTES"}], f"text_input: shape=None{SHAPE}"),
        ([tensor(shape=[2**62, 4], data=["a"])], f"shape=[4611686018427387904, 4]{SHAPE}"),
        ([tensor(shape=[0, 2**62, 4], data=[])], f"shape=[0, 4611686018427387904, 4]{SHAPE}"),
        ([tensor(shape=[0, 2**31], data=[])], SHAPE),
        ([tensor(shape=[-1], data=["a"])], f"shape=[-1]{SHAPE}"),
        ([tensor(shape=[True], data=["a"])], f"shape=[True]{SHAPE}"),
        ([tensor(shape=[], data=["a"])], f"shape=[]{SHAPE}"),
        ([tensor(shape=[1] * 17, data=["a"])], SHAPE),
        ([tensor(shape=1, data=["a"])], f"shape=1{SHAPE}"),
        ([tensor(data=[1])], "text_input=1: must be BYTES"),
        ([tensor("half", data=[1])], "half: FP16 must be a binary tensor of infer"),
        ([{**TEXT, "parameters": {"x": 1}}], "x: not allowed; allowed: binary_data_size"),
        ([{**TEXT, "parameters": 1}], "text_input: parameters=1: must be an object"),
        ([binary(3)], "parameters of text_input: binary_data_size=3: must be from 4 to "),
        ([binary(True)], "binary_data_size=True: must be from 4 to "),
        ([binary(7, "seed")], "parameters of seed: binary_data_size=7: must be 8"),
        ([binary(4, data=["a"])], "text_input: data: must not be there beside binary_data_size"),
        ([binary(4)], "inputs: binary_data_size adds up to 4 bytes, 0 were sent"),
        ({"outputs": [{"name": "text"}]}, "outputs: text: not allowed; allowed: output_ids, tex"),
        (output(parameters=[]), "text_output: parameters=[]: must be an object"),
        (output(parameters={"binary_data": 1}), "text_output: binary_data=1: must be true or fa"),
        (output(parameters={"shared_memory_byte_size": 1}), "shared_memory_byte_size: not allowed"),
        (output(parameters={"classification": 0, "binary_data": True}), "classification: not all"),
    ],
)
def test_what_is_not_allowed_to_infer_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        inferred(**(given if isinstance(given, dict) else {"inputs": given}))


def test_the_list_of_models_is_asked_for_by_state_alone() -> None:
    assert rewritten_index(b"", LIMITS) == b"{}"
    assert rewritten_index(b' {"ready" : true}', LIMITS) == b'{"ready":true}'
    for bad in (b'{"ready":1}', b'{"repository_name":"a"}'):
        with pytest.raises(InvalidArgument, match="ready"):
            rewritten_index(bad, LIMITS)
