"""What passes the gate before Triton, as what, and which of its answers change."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from small_front import (
    KEY,
    LIMITS,
    OPEN,
    TENSORS,
    TRITON,
    OneModel,
    behind,
    on_loop,
    passed,
    revised,
    route_to,
    status,
)

from cog_triton.errors import InvalidArgument, TritonUnavailable
from cog_triton.front.access import Access
from cog_triton.front.json_body import JSONLimits, Numbers
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.message import Answer, json_answer
from cog_triton.front.triton_gate import (
    ServedModels,
    TritonGate,
    coded_failure,
    without_shm_keys,
)
from cog_triton.front.triton_schema import (
    ModelTensors,
    rewritten_generation,
    rewritten_inference,
)

BODIES = LargeBodies()
LENGTH = b"inference-header-content-length"


def triton(access: Access = OPEN) -> TritonGate:
    return TritonGate(*route_to(8000), access, LIMITS, BODIES, OneModel())


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    BODIES.close()


def test_triton_gets_what_was_parsed_and_nothing_else() -> None:
    body = b' {"text_input" : "caf\xc3\xa9 [[[[{{{{", "seed": [[1, 2]], "seed": [[3], [4]]} '
    headers = [(b"x-kept", b"1"), *KEY]
    found = passed(triton(), "POST", f"{TRITON}/generate?x=y", body, *headers)
    assert found.body == b'{"text_input":"caf\\u00e9 [[[[{{{{","seed":[3,4]}'
    assert (found.target, found.headers) == (f"{TRITON}/generate".encode(), [(b"x-kept", b"1")])


def binary(sizes: list[int], data: bytes, declared: int | None = None) -> tuple[bytes, bytes]:
    """A body with binary tensors of those sizes, and the length of its JSON that is declared."""
    inputs: list[Any] = []
    for name, size in zip(("bytes", "mask"), sizes, strict=False):
        inputs.append({"name": name, "shape": [size], "datatype": "UINT8"})
        inputs[-1]["parameters"] = {"binary_data_size": size}
    head = json.dumps({"inputs": inputs}, indent=1).encode()
    return head + data, b"%d" % (len(head) if declared is None else declared)


@pytest.mark.parametrize(
    ("body", "length"),
    [
        *(binary([3], b"\x00"), binary([3], b"\x00\x01\x02\x03"), binary([-1], b"")),
        *(binary([3], b"abc", declared=10**9), (b"{}", b"3"), (b"{}", b"-1"), (b"{}", b"+2")),
        (b"{}", b"0" * 5000),
    ],
)
def test_binary_tensors_that_do_not_add_up_are_refused(body: bytes, length: bytes) -> None:
    assert status(triton(), "POST", f"{TRITON}/infer", body, (LENGTH, length)) == 400


@pytest.mark.parametrize(
    ("was", "text", "now", "code"),
    [
        (500, "Unable to parse 'inputs': no such", 400, "E1005 InvalidArgument: body: Unable"),
        (500, "the stub is not healthy", 500, "E2100 TritonUnknownError: the stub"),
        (400, "unexpected shape", 400, "E1005 InvalidArgument: unexpected shape"),
        (400, "Request for unknown model: 'x' is not", 404, "E1009 NotFound: Request"),
        (200, "generate expects model to produce exactly 1 response, use", 400, "E1005 Inv"),
        (500, "with decoupled transaction policy", 400, "E1005 InvalidArgument: with"),
        (200, "the stub died", 500, "E2100 TritonUnknownError: the stub"),
    ],
)
def test_uncoded_failures_of_triton_get_a_code(was: int, text: str, now: int, code: str) -> None:
    answer: Any = coded_failure(was, json.dumps({"error": text}, separators=(",", ":")).encode())
    assert (answer.status, json.loads(answer.body)["error"][: len(code)]) == (now, code)


def test_coded_failures_and_refusals_of_triton_stay() -> None:
    assert coded_failure(500, b'{"error":"E2105 TritonUnavailable: x"}') is None
    assert coded_failure(200, b'{"model_name":"a","error":"no failure"}') is None
    for empty in (400, 404, 405):
        assert coded_failure(empty, b"") is None
    for body in (b"<html>", b""):
        failure = json_answer(500, {"error": "E2100 TritonUnknownError: HTTP 500"})
        assert coded_failure(500, body) == failure


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", f"{TRITON}/ready"])
def test_a_probe_that_fails_is_no_bad_argument(path: str) -> None:
    found = passed(triton(), "GET", path)
    assert revised(found, 200, b"") is None
    for body, text in ((b"", "not ready"), (b'{"error":"Model not ready"}', "Model not ready")):
        answer = json_answer(400, {"error": f"E2105 TritonUnavailable: {text}"})
        assert revised(found, 400, body) == answer
    assert revised(found, 503, b'{"error":"E2105 TritonUnavailable: x"}') is None


def test_names_of_shared_memory_are_not_told() -> None:
    names = [b"triton_python_backend_shm_region_1f2e", b"cog_triton_12_a_0", b"any key"]
    said = b"%b for 'a' with %b, pool size for key '%b' to 1 bytes"
    redact = passed(triton(), "POST", f"{TRITON}/infer", b"{}").redact
    assert redact is without_shm_keys
    assert redact(said % (*names,)) == said % (*(b"*" * len(name) for name in names),)


CONFIG = b"""{"input":[{"name":"a","data_type":"TYPE_STRING"},{"name":"b","data_type":"TYPE_FP32"}],
    "output":[{"name":"c","data_type":"TYPE_BOOL"}]}"""


@on_loop
async def test_tensors_of_a_model_are_asked_for_once() -> None:
    """What cannot be read, or is not served, is asked for again."""
    configs = {"m": CONFIG, "0": b"", "1": b"[]", "2": b'{"input":[{}]}'}
    asked: list[str] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        asked.append(path.removeprefix("/v2/models/").removesuffix("/config"))
        found = configs.get(asked[-1])
        body = b'{"error":"no"}' if found is None else found
        line = b"400 Bad Request" if found is None else b"200 OK"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (line, len(body), body))
        writer.close()

    models = ServedModels()
    async with behind(handler) as port:
        for _ in range(2):
            known = ModelTensors({"a": "BYTES", "b": "FP32"}, frozenset("c"))
            assert await models.tensors(port, "/v2/models/m") == known
            assert await models.tensors(port, "/v2/models/n") == Answer(400, b'{"error":"no"}')
            for malformed in "012":
                with pytest.raises(TritonUnavailable):
                    await models.tensors(port, f"/v2/models/{malformed}")
        assert sorted(asked) == sorted("mnn001122")
    with pytest.raises(TritonUnavailable):
        await models.tensors(port, "/v2/models/n")


JSON_LIMITS = JSONLimits(numbers=Numbers.FREE)


def generated(**values: Any) -> Any:
    return json.loads(rewritten_generation(json.dumps(values).encode(), JSON_LIMITS, TENSORS))


def inferred(binary: bytes = b"", **values: Any) -> Any:
    head = json.dumps(values).encode()
    length = b"%d" % len(head) if binary else b""
    body, size = rewritten_inference(head + binary, length, JSON_LIMITS, TENSORS)
    assert body[len(body) if size is None else size :] == binary
    return json.loads(body[:size])


def tensor(name: str = "text_input", **values: Any) -> dict[str, Any]:
    return {"name": name, "datatype": TENSORS.inputs.get(name, "?"), "shape": [1, 1], **values}


def sized(size: Any, name: str = "text_input", **values: Any) -> dict[str, Any]:
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
        ({"seed": [1, -1]}, "seed=-1: beyond UINT64"),
        ({"stream": 1}, "stream=1: must be BOOL"),
        ({"temperature": 1e39}, "temperature=1e+39: beyond FP32"),
        ({"a": "b" * 65537}, f"a='{'b' * 76}...: must be text of 65536"),
        ({"\x1b[31m": 1}, r"\x1b[31m: no parameter of clients"),
        # Triton reads both levels, each with all its names.
        ({"parameters": {"id": [1]}}, "id=[1]: must be text"),
        ({"priority": -1, "parameters": {"priority": 1}}, "priority=-1: must be from 0"),
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
        {"binary": b"abcdefgh", "inputs": [sized(8)]},
        {"binary": bytes(4), "inputs": [sized(4, "half", shape=[2])]},
        {
            "binary": b"abc",
            "inputs": [sized(1, "bytes"), TEXT, sized(2, "mask", shape=[2])],
        },
    ],
)
def test_what_tritonclient_infers_with_is_passed_on_as_it_is(values: dict[str, Any]) -> None:
    assert inferred(**values) == {name: values[name] for name in values if name != "binary"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parameters": 3}, "parameters=3: must be an object"),
        ([TEXT, TEXT], "inputs: each must have a name of its own"),
        ([tensor(dat=["a"])], "text_input: dat: not allowed; did you mean 'data'?"),
        ([tensor(datatype="INT32", data=[1])], "datatype='INT32': must be 'BYTES'"),
        ([tensor(shape=[2**62, 4], data=["a"])], f"shape=[4611686018427387904, 4]{SHAPE}"),
        ([tensor(shape=[0, 2**62, 4], data=[])], f"shape=[0, 4611686018427387904, 4]{SHAPE}"),
        ([tensor(shape=[True], data=["a"])], f"shape=[True]{SHAPE}"),
        ([{**TEXT, "parameters": {"x": 1}}], "x: not allowed; allowed: binary_data_size"),
        ([sized(3)], "parameters of text_input: binary_data_size=3: must be from 4 to "),
        ([sized(7, "seed")], "parameters of seed: binary_data_size=7: must be 8"),
        (
            [sized(4, data=["a"])],
            "text_input: data: must not be there beside binary_data_size",
        ),
        ([sized(4)], "inputs: binary_data_size adds up to 4 bytes, 0 were sent"),
        (output(parameters={"classification": 0, "binary_data": True}), "classification: not all"),
    ],
)
def test_what_is_not_allowed_to_infer_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        inferred(**(given if isinstance(given, dict) else {"inputs": given}))
