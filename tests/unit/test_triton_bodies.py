"""What of a body reaches Triton: a list of what is allowed, by name and type."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from small_door import TENSORS, answering, on_loop, run

from cog_triton.door.json_body import JSONLimits, Numbers
from cog_triton.door.message import Answer
from cog_triton.door.triton_bodies import (
    rewritten_generation,
    rewritten_index,
    rewritten_inference,
)
from cog_triton.door.triton_gate import ServedModels
from cog_triton.errors import InvalidArgument, TritonUnavailable

LIMITS = JSONLimits(numbers=Numbers.FREE)


def generated(**values: Any) -> Any:
    return json.loads(rewritten_generation(json.dumps(values).encode(), LIMITS, TENSORS))


def inferred(binary: bytes = b"", **values: Any) -> Any:
    head = json.dumps(values).encode()
    length = b"%d" % len(head) if binary else b""
    body, size = rewritten_inference(head + binary, length, LIMITS, TENSORS)
    return json.loads(body[:size])


def tensor(name: str = "text_input", **values: Any) -> dict[str, Any]:
    return {"name": name, "datatype": TENSORS.inputs.get(name, "?"), "shape": [1, 1], **values}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"text_input": "a", "max_tokens": 3, "seed": 2**64 - 1, "stream": True, "temperature": 1},
        {"text_input": ["a", "b"], "temperature": [0.5, 1], "input_ids": []},
        {"id": "a", "parameters": {"max_tokens": 3, "top_k": 4, "stop": "x", "Streaming": False}},
        {"sequence_id": 2**64 - 1, "sequence_start": True, "sequence_end": False},
        {"sequence_id": "abc", "priority": 1, "timeout": 1000, "binary_data_output": False},
        {"timeout": 2**63 - 1, "parameters": {"timeout": 1, "id": "a"}},
    ],
)
def test_what_released_clients_send_is_passed_on_as_it_is(values: dict[str, Any]) -> None:
    assert generated(**values) == values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"text_input": 5}, "text_input=5: must be BYTES"),
        ({"text_input": ["a", None]}, "text_input=None: must be BYTES"),
        ({"text_input": [["a"], "b"]}, r"text_input=a list: must be BYTES"),
        ({"max_tokens": 2.0}, "max_tokens=2.0: must be INT32"),
        ({"max_tokens": True}, "max_tokens=True: must be INT32"),
        ({"max_tokens": 2**32 + 3}, "max_tokens=4294967299: beyond INT32"),
        ({"parameters": {"max_tokens": -(2**31) - 1}}, "max_tokens=-2147483649: beyond INT32"),
        ({"seed": -1}, "seed=-1: beyond UINT64"),
        ({"stream": 1}, "stream=1: must be BOOL"),
        ({"temperature": 1e39}, r"temperature=1e\+39: beyond FP32"),
        ({"temperature": "1"}, "temperature='1': must be FP32"),
        ({"half": 1}, "half: FP16 must be a binary tensor"),
        ({"parameters": "x"}, "parameters: must be an object"),
        ({"parameters": {"a": {}}}, "a=an object: must be text"),
        ({"a": [1]}, "a=a list: must be text"),
        ({"a": None}, "a=None: must be text"),
        ({"a": 2**63}, "a=9223372036854775808: must be text"),
        ({"a": "b" * 65537}, "a='bbb.*: must be text of 65536"),
        ({f"a{i}": 1 for i in range(65)}, "parameters: 65; 64 at most"),
        ({"a b": 1}, "a b: no parameter of clients: binary_data_output, priority"),
        ({"": 1}, ": no parameter of clients"),
        ({"\x1b[31m": 1}, r": no parameter of clients"),
        ({"triton_enable_empty_final_response": True}, "triton_enable.*: no parameter of clients"),
        ({"classification": 1}, "classification: no parameter of clients"),
        ({"shared_memory_region": "a"}, "shared_memory_region: no parameter of clients"),
        ({"id": 5}, "id=5: must be text"),
        ({"id": "a" * 1025}, "id='aaa.*must be text of 1024"),
        ({"priority": -1}, "priority=-1: must be from 0 to 4294967295"),
        ({"timeout": 2**63}, "timeout=9223372036854775808: must be from 0"),
        ({"sequence_start": 1}, "sequence_start=1: must be true or false"),
        ({"sequence_id": True}, "sequence_id=True: must be from 0"),
    ],
)
def test_what_is_not_allowed_to_generate_is_refused_by_name(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        generated(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"parameters": {"parameters": {"classification": [1]}}}, "parameters=an object: must be"),
        ({"parameters": {"id": [1]}}, "id=a list: must be text"),
        ({"priority": 1, "parameters": {"priority": -1}}, "priority=-1: must be from 0"),
        ({"priority": -1, "parameters": {"priority": 1}}, "priority=-1: must be from 0"),
        ({"a": 1, "parameters": {"a": {"shared_memory_region": [1]}}}, "a=an object: must be"),
        ({"a": {}, "parameters": {"a": 1}}, "a=an object: must be text"),
        (
            {**{f"a{i}": 1 for i in range(32)}, "parameters": {f"a{i}": 1 for i in range(33)}},
            "parameters: 65; 64 at most",
        ),
    ],
)
def test_each_level_of_parameters_is_checked_by_itself(values: dict[str, Any], words: str) -> None:
    """Triton reads both, each with all its names."""
    with pytest.raises(InvalidArgument, match=words):
        generated(text_input="x", **values)


def test_null_is_as_good_as_absent() -> None:
    assert generated(text_input="x", id=None, parameters=None) == {"text_input": "x"}
    bare = {"inputs": [tensor(data=["a"])], "outputs": [{"name": "text_output"}]}
    nulls = {
        "id": None,
        "inputs": [tensor(data=["a"], parameters=None)],
        "outputs": [{"name": "text_output", "parameters": None}],
        "parameters": None,
    }
    assert inferred(**nulls) == inferred(**bare)
    without = {"inputs": bare["inputs"]}
    assert inferred(**without, outputs=None) == inferred(**without)
    with pytest.raises(InvalidArgument, match="inputs: must be a list"):
        inferred(inputs=None)


def test_nested_data_is_made_flat() -> None:
    """Triton counts the outer list's items only, and reads those of the inner ones."""
    values = inferred(inputs=[tensor("input_ids", shape=[2, 2], data=[[1, 2], [3, 4]])])
    assert values["inputs"][0]["data"] == [1, 2, 3, 4]
    assert generated(input_ids=[[1, 2, 3]]) == {"input_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    "values",
    [
        {"inputs": [tensor(data=["a"])], "outputs": [{"name": "text_output"}], "id": "7"},
        {
            "inputs": [tensor(data=[["a"]])],
            "outputs": [{"name": "output_ids", "parameters": {"binary_data": True}}],
            "parameters": {"binary_data_output": True, "sequence_id": 3, "Streaming": True},
        },
        {"inputs": [tensor("input_ids", shape=[1, 0], data=[])]},
        {"binary": b"abcdefgh", "inputs": [tensor(parameters={"binary_data_size": 8})]},
        {
            "binary": bytes(4),
            "inputs": [tensor("half", shape=[2], parameters={"binary_data_size": 4})],
        },
    ],
)
def test_what_tritonclient_infers_with_is_allowed(values: dict[str, Any]) -> None:
    assert inferred(**values)["inputs"][0]["name"] == values["inputs"][0]["name"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"output": []}, "request: output: not allowed; did you mean 'outputs'?; allowed: id, inp"),
        ({"inputs": {}}, "inputs: must be a list of objects"),
        ({"inputs": [tensor(data=["a"])] * 2}, "inputs: each must have a name of its own"),
        ({"inputs": [{"name": ["a"]}]}, "inputs: each must have a name of its own"),
        ({"inputs": [tensor("textinput", data=["a"])]}, "inputs: textinput: not allowed; did you"),
        ({"inputs": [tensor(dat=["a"])]}, "text_input: dat: not allowed; did you mean 'data'?"),
        ({"inputs": [tensor(datatype="INT32", data=[1])]}, "datatype='INT32': must be 'BYTES'"),
        ({"inputs": [tensor(shape=[2**62, 4], data=["a"])]}, "shape=a list: must be 1 to 16"),
        ({"inputs": [tensor(shape=[0, 2**62, 4], data=[])]}, "shape=a list: must be 1 to 16"),
        ({"inputs": [tensor(shape=[-1], data=["a"])]}, "shape=a list: must be 1 to 16"),
        ({"inputs": [tensor(shape=[True], data=["a"])]}, "shape=a list: must be 1 to 16"),
        ({"inputs": [tensor(shape=[1] * 17, data=["a"])]}, "shape=a list: must be 1 to 16"),
        ({"inputs": [tensor(shape=1, data=["a"])]}, "shape=1: must be 1 to 16"),
        ({"inputs": [tensor(shape=[2], data=["a"])]}, "shape has 2 elements, data has 1"),
        ({"inputs": [tensor(data=[1])]}, "text_input=1: must be BYTES"),
        ({"inputs": [tensor()]}, "text_input=None: must be BYTES"),
        (
            {"inputs": [tensor(data=["a"], parameters={"x": 1})]},
            "x: not allowed; allowed: binary_d",
        ),
        ({"inputs": [tensor(data=["a"], parameters=1)]}, "text_input: must be an object"),
        ({"inputs": [tensor(parameters={"shared_memory_region": "a"})]}, "shared_memory_region: n"),
        ({"inputs": [tensor(parameters={"binary_data_size": 3})]}, "must be 4 or more"),
        ({"inputs": [tensor(parameters={"binary_data_size": True})]}, "=True: must be 4 or more"),
        ({"inputs": [tensor("seed", parameters={"binary_data_size": 9})]}, "=9: must be 8"),
        ({"inputs": [tensor(data=["a"], parameters={"binary_data_size": 4})]}, "data: must not"),
        ({"inputs": [tensor(parameters={"binary_data_size": 4})]}, "adds up to 4 bytes, 0 were"),
        (
            {"outputs": [{"name": "text"}]},
            "outputs: text: not allowed; .*allowed: output_ids, text",
        ),
        ({"outputs": [{"name": "text_output", "datatype": "BYTES"}]}, "text_output: datatype: not"),
        ({"parameters": 3}, "parameters: must be an object"),
        ({"parameters": {"classification": 1}}, "classification: no parameter of clients"),
    ],
)
def test_what_is_not_allowed_to_infer_is_refused_by_name(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words.replace("?", r"\?")):
        inferred(**values)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"classification": 1}, "text_output: classification: not allowed; allowed: binary_data"),
        ({"classification": 0, "binary_data": True}, "classification: not allowed"),
        ({"shared_memory_byte_size": 1}, "shared_memory_byte_size: not allowed"),
        ({"binary_data": 1}, "text_output: binary_data: must be true or false"),
        ([], "parameters of text_output: must be an object"),
    ],
)
def test_parameters_of_outputs_are_binary_data_alone(parameters: Any, words: str) -> None:
    """`classification` of text ends Triton 24.10."""
    with pytest.raises(InvalidArgument, match=words):
        inferred(inputs=[], outputs=[{"name": "text_output", "parameters": parameters}])


def test_the_list_of_models_is_asked_for_by_state_alone() -> None:
    assert rewritten_index(b"", LIMITS) == b"{}"
    assert rewritten_index(b' {"ready" : true}', LIMITS) == b'{"ready":true}'
    for bad in (b'{"ready":1}', b'{"repository_name":"a"}'):
        with pytest.raises(InvalidArgument, match="ready"):
            rewritten_index(bad, LIMITS)


@on_loop
async def test_tensors_of_a_model_are_asked_for_once() -> None:
    config = json.dumps(
        {
            "input": [
                {"name": "a", "data_type": "TYPE_STRING"},
                {"name": "b", "data_type": "TYPE_FP32"},
            ],
            "output": [{"name": "c", "data_type": "TYPE_BOOL"}],
        }
    ).encode()
    asked: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        there = asked[-1] == b"/v2/models/m/config"
        writer.write(b"HTTP/1.1 %b\r\n\r\n" % (b"200 OK" if there else b"400 Bad Request"))
        writer.write(config if there else b'{"error":"no"}')
        writer.close()

    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    models = ServedModels()
    for _ in range(3):
        found = await models.tensors(port, "/v2/models/m")
        assert not isinstance(found, Answer)
        assert (found.inputs, found.outputs) == ({"a": "BYTES", "b": "FP32"}, {"c"})
    for _ in range(2):
        answer = await models.tensors(port, "/v2/models/n")
        assert answer == Answer(400, b'{"error":"no"}')
    server.close()
    assert asked == [b"/v2/models/m/config"] + [b"/v2/models/n/config"] * 2
    with pytest.raises(TritonUnavailable):
        await models.tensors(port, "/v2/models/n")


@pytest.mark.parametrize("config", [b"", b"[]", b'{"input":[{}]}', b"nonsense"])
def test_a_config_that_cannot_be_read_is_a_coded_503(config: bytes) -> None:
    async def main() -> None:
        server = await asyncio.start_server(
            answering(b"HTTP/1.1 200 OK\r\n\r\n" + config), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        try:
            await ServedModels().tensors(port, "/v2/models/m")
        finally:
            server.close()

    with pytest.raises(TritonUnavailable):
        run(main())
