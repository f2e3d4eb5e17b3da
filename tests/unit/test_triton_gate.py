"""What passes the gate before Triton, as what, and which of its answers come otherwise."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from small_front import (
    KEY,
    LIMITS,
    OPEN,
    PRIVATE_MODELS,
    TRITON,
    OneModel,
    behind,
    on_loop,
    passed,
    revised,
    route_to,
    status,
)

from cog_triton.errors import TritonUnavailable
from cog_triton.front.access import Access
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.message import Answer, json_answer
from cog_triton.front.triton_gate import (
    ServedModels,
    TritonGate,
    coded_failure,
    without_shm_keys,
)
from cog_triton.front.triton_schema import ModelTensors

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


def test_binary_tensors_pass_behind_json_that_is_written_anew() -> None:
    body, length = binary([3, 2], b"\x00\x01\x02[[")
    gzipped = (gzip.compress(body), (LENGTH, length), (b"content-encoding", b"gzip"))
    for sent in ((body, (LENGTH, length)), gzipped):
        found = passed(triton(), "POST", f"{TRITON}/infer", *sent)
        ((_, length),) = [pair for pair in found.headers if pair[0] == LENGTH]
        assert found.body[int(length) :] == b"\x00\x01\x02[["
        assert json.loads(found.body[: int(length)])["inputs"][0]["name"] == "bytes"
        assert b"\n" not in found.body


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
        (503, "the model is not ready", 503, "E2105 TritonUnavailable: the model"),
        (400, "unexpected shape", 400, "E1005 InvalidArgument: unexpected shape"),
        (400, "Request for unknown model: 'x' is not", 404, "E1009 NotFound: Request"),
        (200, "generate expects model to produce exactly 1 response, use", 400, "E1005 Inv"),
        (400, "with decoupled transaction policy", 400, "E1005 InvalidArgument: with"),
        (500, "with decoupled transaction policy", 400, "E1005 InvalidArgument: with"),
        (200, "E1002 PromptTooLong: a", 400, "E1002 PromptTooLong: a"),
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


@pytest.mark.parametrize("model", PRIVATE_MODELS)
def test_private_models_are_unknown(model: str) -> None:
    for rest in ("", "/config", "/stats", "/ready", "/versions/1/stats"):
        assert status(triton(), "GET", f"/v2/models/{model}{rest}") == 404, rest
    for rest in ("infer", "generate", "generate_stream", "versions/1/generate"):
        assert status(triton(), "POST", f"/v2/models/{model}/{rest}", b"{}") == 404, rest
        assert status(triton(), "POST", f"/v2/models/{model}2/{rest}", b"{}") == 200, rest


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
