"""What passes the gate before Triton, as what, and which of its answers come otherwise."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator

import pytest
from small_door import (
    KEY,
    LIMITS,
    LOCKED,
    OPEN,
    PRIVATE_MODELS,
    TRITON,
    OneModel,
    answered,
    passed,
    revised,
    route_to,
    status,
)

from cog_triton.door.access import Access
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.triton_gate import (
    TritonGate,
    coded_failure,
    published_models,
    without_shm_keys,
)


def triton(access: Access = OPEN) -> TritonGate:
    return TritonGate(route_to(8000), access, LIMITS, BODIES, OneModel())


BODIES = LargeBodies()


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    BODIES.close()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v2", b""),
        ("GET", "/v2/", b""),
        ("GET", "/v2/health/live", b""),
        ("HEAD", "/v2/health/ready", b""),
        ("GET", TRITON, b""),
        ("GET", f"{TRITON}/versions/1/ready", b""),
        ("GET", f"{TRITON}/config", b""),
        ("GET", f"{TRITON}/stats", b""),
        ("GET", "/v2/models/stats", b""),
        ("POST", "/v2/repository/index", b""),
        ("POST", f"{TRITON}/generate", b"{}"),
        ("POST", f"{TRITON}/versions/1/generate_stream", b"{}"),
        ("POST", f"{TRITON}/infer", b'{"inputs":[]}'),
    ],
)
def test_what_triton_publishes(method: str, path: str, body: bytes) -> None:
    assert status(triton(), method, path, body) == 200
    open_without_key = path.startswith("/v2/health/")
    assert status(triton(LOCKED), method, path, body) == (200 if open_without_key else 401)
    assert status(triton(LOCKED), method, path, body, *KEY) == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/logging"),
        ("POST", "/v2/logging"),
        ("GET", "/v2/trace/setting"),
        ("POST", f"{TRITON}/trace/setting"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("POST", "/v2/systemsharedmemory/region/evil/register"),
        ("POST", "/v2/cudasharedmemory/region/evil/register"),
        ("POST", "/v2/repository/models/x/load"),
        ("POST", "/v2/repository/models/x/unload"),
        ("GET", "/v2/repository/index"),
        ("POST", "/v2/health/live"),
        ("POST", f"{TRITON}/config"),
        ("GET", f"{TRITON}/generate"),
        ("POST", f"{TRITON}/../../logging/generate"),
        ("POST", "/v2/models/a%2Fb/generate"),
        ("POST", "/v2/models/../logging"),
        ("POST", "/V2/models/x/generate"),
        ("POST", f"{TRITON}/generate/"),
        ("GET", "//v2/health/live"),
        ("GET", "/metrics"),
        ("DELETE", "/v2"),
    ],
)
def test_what_triton_does_not_publish(method: str, path: str) -> None:
    found = answered(triton(), method, path, b"{}")
    assert found.status == 404
    assert json.loads(found.body)["error"].startswith("E1009 NotFound: ")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"[" * 65 + b"]" * 65,
        b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"a":1',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b"[]",
        b"\xff",
        b'{"a":' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["generate", "generate_stream", "infer"])
def test_json_that_ends_triton_does_not_reach_it(path: str, body: bytes) -> None:
    found = answered(triton(), "POST", f"{TRITON}/{path}", body)
    assert found.status == 400
    assert b"E1005" in found.body


def test_triton_gets_what_was_parsed_and_nothing_else() -> None:
    body = b' {"text_input" : "caf\xc3\xa9 [[[[{{{{", "seed": [[1, 2]], "seed": [[3], [4]]} '
    headers = [(b"x-kept", b"1"), *KEY]
    found = passed(triton(), "POST", f"{TRITON}/generate?x=y", body, *headers)
    assert found.body == b'{"text_input":"caf\\u00e9 [[[[{{{{","seed":[3,4]}'
    assert (found.target, found.headers) == (f"{TRITON}/generate".encode(), [(b"x-kept", b"1")])
    assert b"\r\ncontent-length: %d\r\n" % len(found.body) in found.encoded()


def binary(
    sizes: list[int], data: bytes, declared: int | None = None
) -> tuple[bytes, tuple[bytes, bytes]]:
    inputs = [
        {
            "name": name,
            "shape": [size],
            "datatype": "UINT8",
            "parameters": {"binary_data_size": size},
        }
        for name, size in zip(("bytes", "mask"), sizes, strict=False)
    ]
    head = json.dumps({"inputs": inputs}, indent=1).encode()
    size = len(head) if declared is None else declared
    return head + data, (b"inference-header-content-length", b"%d" % size)


def test_binary_tensors_pass_behind_json_that_is_written_anew() -> None:
    body, header = binary([3, 2], b"\x00\x01\x02[[")
    gzipped = (gzip.compress(body), header, (b"content-encoding", b"gzip"))
    for sent in ((body, header), gzipped):
        found = passed(triton(), "POST", f"{TRITON}/infer", *sent)
        ((_, length),) = [pair for pair in found.headers if pair[0] == header[0]]
        assert found.body[int(length) :] == b"\x00\x01\x02[["
        assert json.loads(found.body[: int(length)])["inputs"][0]["name"] == "bytes"


@pytest.mark.parametrize(
    ("body", "header"),
    [
        binary([3], b"\x00"),
        binary([3], b"\x00\x01\x02\x03"),
        binary([3], b"abc", declared=10**9),
        binary([-1], b""),
        (b"{}", (b"inference-header-content-length", b"-1")),
        (b"{}", (b"inference-header-content-length", b"9" * 30)),
    ],
)
def test_binary_tensors_that_do_not_add_up_are_refused(
    body: bytes, header: tuple[bytes, bytes]
) -> None:
    assert status(triton(), "POST", f"{TRITON}/infer", body, header) == 400


def test_compressed_bodies_are_bounded_after_inflation() -> None:
    def sent(body: bytes, encoding: bytes) -> int:
        return status(triton(), "POST", f"{TRITON}/generate", body, (b"content-encoding", encoding))

    good = b'{"text_input":"x"}'
    assert sent(gzip.compress(good), b"gzip") == 200
    assert sent(zlib.compress(good), b"Deflate") == 200
    assert sent(good, b"identity") == 200
    assert sent(gzip.compress(b" " * (2 << 20)), b"gzip") == 413
    assert sent(gzip.compress(good)[:-3], b"gzip") == 400
    assert sent(gzip.compress(good) + b"more", b"gzip") == 400
    assert sent(good, b"gzip") == 400
    assert sent(good, b"br") == 415


@pytest.mark.parametrize(
    ("was", "text", "now", "code"),
    [
        (
            500,
            "Unable to parse 'inputs': no such object member",
            400,
            "E1005 InvalidArgument: body: ",
        ),
        (500, "the stub is not healthy", 500, "E2100 TritonUnknownError: the stub"),
        (503, "the model is not ready", 503, "E2105 TritonUnavailable: the model"),
        (400, "unexpected shape", 400, "E1005 InvalidArgument: unexpected shape"),
        (400, "Request for unknown model: 'x' is not found", 404, "E1009 NotFound: Request"),
        (200, "generate expects model to produce exactly 1 response, use", 400, "E1005 Inv"),
        (200, "E1002 PromptTooLong: a", 400, "E1002 PromptTooLong: a"),
        (200, "the stub died", 500, "E2100 TritonUnknownError: the stub"),
    ],
)
def test_uncoded_failures_of_triton_get_a_code(was: int, text: str, now: int, code: str) -> None:
    answer = coded_failure(was, json.dumps({"error": text}, separators=(",", ":")).encode())
    assert answer is not None
    assert answer.status == now
    assert json.loads(answer.body)["error"].startswith(code)


def test_coded_failures_and_refusals_of_triton_stay() -> None:
    assert coded_failure(500, b'{"error":"E2105 TritonUnavailable: x"}') is None
    assert coded_failure(200, b'{"model_name":"a","error":"no failure"}') is None
    for empty in (400, 404, 405):
        assert coded_failure(empty, b"") is None
    for body in (b"<html>", b""):
        answer = coded_failure(500, body)
        assert answer is not None
        assert json.loads(answer.body) == {"error": "E2100 TritonUnknownError: HTTP 500"}


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", f"{TRITON}/ready"])
def test_a_probe_that_fails_is_no_bad_argument(path: str) -> None:
    found = passed(triton(), "GET", path)
    assert revised(found, 200, b"") is None
    for body, text in (
        (b"", "not ready"),
        (b'{"error":"Model version not ready"}', "Model version not ready"),
    ):
        answer = revised(found, 400, body)
        assert answer is not None
        assert answer.status == 400
        assert json.loads(answer.body) == {"error": f"E2105 TritonUnavailable: {text}"}
    assert revised(found, 503, b'{"error":"E2105 TritonUnavailable: x"}') is None


def test_names_of_shared_memory_are_not_told() -> None:
    said = (
        b"pool size for key 'triton_python_backend_shm_region_1f2e' to 1 bytes, cog_triton_12_a_0"
    )
    told = without_shm_keys(said)
    assert len(told) == len(said)
    assert b"region" not in told
    assert b"cog_triton" not in told
    assert told.startswith(b"pool size for key '*")


@pytest.mark.parametrize("model", PRIVATE_MODELS)
def test_private_models_are_unknown(model: str) -> None:
    for rest in ("", "/config", "/stats", "/ready", "/versions/1/stats"):
        assert status(triton(), "GET", f"/v2/models/{model}{rest}") == 404, rest
    for rest in ("infer", "generate", "generate_stream", "versions/1/generate"):
        assert status(triton(), "POST", f"/v2/models/{model}/{rest}", b"{}") == 404, rest
        assert status(triton(), "POST", f"/v2/models/{model}2/{rest}", b"{}") == 200, rest


def test_private_models_are_in_no_list() -> None:
    names = (*PRIVATE_MODELS, "tensorrt_llm")
    index = [{"name": name, "state": "READY"} for name in names]
    found = published_models(200, json.dumps(index).encode())
    assert found is not None
    assert json.loads(found.body) == index[-1:]
    stats = {"model_stats": [{"name": name, "inference_count": 1} for name in names]}
    found = published_models(200, json.dumps(stats).encode())
    assert found is not None
    assert json.loads(found.body) == {"model_stats": stats["model_stats"][-1:]}
    assert published_models(200, b"") is None
    for status_ in (404, 500):
        refused = published_models(status_, b'{"error": "no"}')
        assert refused is not None
        assert refused.status == status_
