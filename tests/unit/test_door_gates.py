"""What passes the gates of the front door, and in which shape refusals come."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from small_door import OneModel, route_to

from cog_triton.door.access import Access
from cog_triton.door.cog_gate import CogGate
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.limits import Limits
from cog_triton.door.message import Answer, Forward, Refused, Request
from cog_triton.door.openai_gate import MetricsGate, OpenAIGate
from cog_triton.door.triton_gate import (
    TritonGate,
    coded_failure,
    published_models,
    without_shm_keys,
)
from cog_triton.door.webhook_relay import WebhookRelay, WebhookRules

BODIES = LargeBodies()
LIMITS = Limits(body_bytes=1 << 20)
OPEN = Access(None, loopback=False)
LOCKED = Access("key", loopback=False)
KEY = [(b"authorization", b"Bearer key")]
PRIVATE_MODELS = ("engine_steps", "lora_loader")
TRITON = "/v2/models/tensorrt_llm"


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    BODIES.close()


CLOSED = 1
"""Port that nothing listens on."""


def decided(
    gate: Any, method: str, path: str, body: bytes = b"", *headers: tuple[bytes, bytes]
) -> Forward | Answer:
    """The decision; a refusal as its answer."""
    request = Request(method, path.encode(), list(headers), body, peer="203.0.113.9")

    async def main() -> Forward | Answer:
        try:
            found: Forward | Answer = await gate.decide(request)
            return found
        except Refused as refused:
            answer: Answer = gate.refusal(refused.status, refused.error)
            return answer

    return asyncio.run(main())


def status(
    gate: Any, method: str, path: str, body: bytes = b"", *headers: tuple[bytes, bytes]
) -> int:
    """200 for what passes."""
    found = decided(gate, method, path, body, *headers)
    return 200 if isinstance(found, Forward) else found.status


def triton(access: Access = OPEN) -> TritonGate:
    return TritonGate(route_to(8000), access, LIMITS, BODIES, OneModel())


def cog(access: Access = OPEN, health: dict[str, Any] | None = None) -> CogGate:
    route = route_to(CLOSED, **(health or {"status": "READY"}))
    return CogGate(route, access, LIMITS, BODIES, WebhookRelay(WebhookRules()))


def openai(access: Access = OPEN, *, metrics_public: bool = False) -> OpenAIGate:
    return OpenAIGate(route_to(8080), access, LIMITS, BODIES, metrics_public=metrics_public)


def metrics(access: Access = OPEN, *, metrics_public: bool = False) -> MetricsGate:
    return MetricsGate(route_to(8002), access, LIMITS, BODIES, metrics_public=metrics_public)


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
    found = decided(triton(), method, path, b"{}")
    assert isinstance(found, Answer)
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
    found = decided(triton(), "POST", f"{TRITON}/{path}", body)
    assert isinstance(found, Answer)
    assert found.status == 400
    assert b"E1005" in found.body


def test_triton_gets_what_was_parsed_and_nothing_else() -> None:
    body = b' {"text_input" : "caf\xc3\xa9 [[[[{{{{", "seed": [[1, 2]], "seed": [[3], [4]]} '
    headers = [(b"x-kept", b"1"), *KEY]
    found = decided(triton(), "POST", f"{TRITON}/generate?x=y", body, *headers)
    assert isinstance(found, Forward)
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
    found = decided(triton(), "POST", f"{TRITON}/infer", body, header)
    assert isinstance(found, Forward)
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
    assert sent(good, b"br") == 400


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
    answer = coded_failure(500, b"<html>")
    assert answer is not None
    assert b"E2100 TritonUnknownError: HTTP 500" in answer.body


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", f"{TRITON}/ready"])
def test_a_probe_that_fails_is_no_bad_argument(path: str) -> None:
    found = decided(triton(), "GET", path)
    assert isinstance(found, Forward)
    assert found.revise is not None
    assert found.revise(200, b"") is None
    for body, text in (
        (b"", "not ready"),
        (b'{"error":"Model version not ready"}', "Model version not ready"),
    ):
        answer = found.revise(400, body)
        assert answer is not None
        assert answer.status == 400
        assert json.loads(answer.body) == {"error": f"E2105 TritonUnavailable: {text}"}
    assert found.revise(503, b'{"error":"E2105 TritonUnavailable: x"}') is None


def test_an_empty_refusal_of_triton_stays() -> None:
    for status in (400, 404, 405):
        assert coded_failure(status, b"") is None
    answer = coded_failure(500, b"")
    assert answer is not None
    assert json.loads(answer.body) == {"error": "E2100 TritonUnknownError: HTTP 500"}


def test_names_of_shared_memory_are_not_told() -> None:
    said = (
        b"pool size for key 'triton_python_backend_shm_region_1f2e' to 1 bytes, cog_triton_12_a_0"
    )
    told = without_shm_keys(said)
    assert len(told) == len(said)
    assert b"region" not in told
    assert b"cog_triton" not in told
    assert told.startswith(b"pool size for key '*")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/openapi.json"),
        ("POST", "/predictions"),
        ("PUT", "/predictions/an-id"),
        ("POST", "/predictions/an-id/cancel"),
    ],
)
def test_what_cog_publishes(method: str, path: str) -> None:
    assert status(cog(), method, path, b"{}") == 200
    assert status(cog(LOCKED), method, path, b"{}") == 401
    assert status(cog(LOCKED), method, path, b"{}", *KEY) == 200


def test_cogs_health_is_open_and_its_stop_is_not() -> None:
    assert status(cog(LOCKED), "HEAD", "/") == 200  # what CogWatch asks
    assert status(cog(LOCKED), "GET", "/") == 401
    assert status(cog(LOCKED), "GET", "/health-check") == 200
    assert status(cog(), "POST", "/shutdown") == 401
    assert status(cog(LOCKED), "POST", "/shutdown", b"", *KEY) == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/predictions"),
        ("POST", "/trainings"),
        ("PUT", "/predictions/"),
        ("GET", "/x"),
        ("POST", "/predictions/a/b/cancel"),
        ("POST", "/health-check"),
    ],
)
def test_what_cog_does_not_publish_is_a_coded_404(method: str, path: str) -> None:
    found = decided(cog(), method, path, b"{}")
    assert isinstance(found, Answer)
    assert found.status == 404
    assert json.loads(found.body)["error"].startswith("E1009")


@pytest.mark.parametrize(
    ("health", "code"),
    [
        ({"status": "STARTING"}, "E2105"),
        ({"status": "DEFUNCT"}, "E2105"),
        ({"status": "UNHEALTHY", "user_healthcheck_error": "channel closed"}, "E2105"),
        ({"status": "SETUP_FAILED", "setup": {"logs": "E1305 EngineIncompatible: sm_90"}}, "E1305"),
        ({}, "E2105"),
    ],
)
def test_predictions_are_a_coded_503_while_cog_cannot_take_them(
    health: dict[str, Any], code: str
) -> None:
    gate = cog()
    gate.route.upstream.state._take(health)
    accept = (b"accept", b"text/event-stream")
    for method, path in (("POST", "/predictions"), ("PUT", "/predictions/a")):
        found = decided(gate, method, path, b'{"input":{}}', accept)
        assert isinstance(found, Answer)
        assert found.status == (400 if code.startswith("E1") else 503)
        assert json.loads(found.body)["error"].startswith(code)
        assert json.loads(found.body)["status"] == "failed"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ([], 200),
        ([b""], 200),
        ([b"application/json"], 200),
        ([b"Application/JSON; charset=utf-8"], 200),
        ([b"application/vnd.api+json"], 200),
        ([b"application/x-www-form-urlencoded"], 415),
        ([b"text/plain"], 415),
    ],
)
def test_predictions_are_json_even_if_nobody_says_so(kind: list[bytes], code: int) -> None:
    headers = [(b"content-type", each) for each in kind]
    found = decided(cog(), "POST", "/predictions", b'{"input":{}}', *headers)
    if code == 200:
        assert isinstance(found, Forward)
        assert [value for name, value in found.headers if name == b"content-type"] == [
            kind[0] if kind and kind[0] else b"application/json"
        ]
    else:
        assert isinstance(found, Answer)
        assert found.status == code
        assert b"E1005 InvalidArgument: Content-Type: " in found.body


def test_docs_that_cogs_index_names_are_the_schema() -> None:
    found = decided(cog(), "GET", "/docs")
    assert isinstance(found, Answer)
    assert (found.status, found.headers) == (307, ((b"location", b"/openapi.json"),))


def test_webhooks_to_private_addresses_are_refused_before_anything_runs() -> None:
    for url in (b'"http://169.254.169.254/"', b'"http://127.0.0.1:9/"', b'"ftp://a/"', b"7"):
        body = b'{"input":{"prompt":"\\"webhook\\""},"webhook":%s}' % url
        found = decided(cog(), "POST", "/predictions", body)
        assert isinstance(found, Answer)
        assert found.status == 400
        assert json.loads(found.body)["error"].startswith("E1005 InvalidArgument: webhook")
    for body in (b'{"webhook":null}', b'{"input":{"prompt":"\\"webhook\\""}}', b"", b"\n {}"):
        assert status(cog(), "POST", "/predictions", body) == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"webh\\u006fok":"http://127.0.0.1:9/"}',
        b'["id",{"prompt":"a"},{},"http://127.0.0.1:9/",["completed"]]',  # coglet takes it, too
        b'{"webhook":"http://127.0.0.1:9/","unknown":' + b"1" * 5000 + b"}",
        b'{"webhook":"http://example.com/' + b"a" * 8192 + b'"}',
        *(b'"webhook"', b" [", b"\xef\xbb\xbf{}"),
    ],
)
def test_no_webhook_hides_from_the_gate(body: bytes) -> None:
    assert status(cog(), "POST", "/predictions", body) == 400


def test_coglet_is_told_to_post_to_the_door() -> None:
    body = b'{"webhook":"http://93.184.216.34/hook","webhook_events_filter":["output"]}'
    found = decided(cog(), "PUT", "/predictions/a", body)
    assert isinstance(found, Forward)
    told = json.loads(found.body)
    assert told["webhook"].startswith("http://127.0.0.1:")
    assert told["webhook"].endswith("/0/http%3A%2F%2F93.184.216.34%2Fhook")
    assert told["webhook_events_filter"] == ["output", "completed"]


@pytest.mark.parametrize(
    "name", ["..", ".", "a/b", "../../x", "/tmp/x", "", "a" * 201, "a\nb", "%2e", "-x"]
)
def test_an_id_that_is_no_name_of_a_directory_is_refused(name: str) -> None:
    escaped = json.dumps({"id": name}).replace("id", "i\\u0064")
    for body in (json.dumps({"id": name, "input": {}}), escaped):
        found = decided(cog(), "POST", "/predictions", body.encode())
        assert isinstance(found, Answer)
        assert (found.status, json.loads(found.body)["error"][:5]) == (400, "E1005")
    if name and "/" not in name and "\n" not in name:
        assert status(cog(), "PUT", f"/predictions/{name}", b"{}") == 400


def test_usual_ids_pass() -> None:
    for name in ("pred_18ea3f8bc132108a", "7b5c1e9e-0d2f-4f0e", "a.b:c~d@e=f+g", "x" * 200):
        body = json.dumps({"id": name, "input": {"prompt": '"id"'}}).encode()
        assert status(cog(), "POST", "/predictions", body) == 200
        assert status(cog(), "PUT", f"/predictions/{name}", body) == 200
    for body in (b'{"id":null}', b'{"input":{"id":"a/b"}}', b'{"id":7}'):
        assert status(cog(), "POST", "/predictions", body) == 200


def test_what_our_own_health_check_tells_is_told_by_the_prediction() -> None:
    reason = "E2105 TritonUnavailable: a"
    gate = cog(health={"status": "UNHEALTHY", "user_healthcheck_error": reason})
    assert status(gate, "POST", "/predictions", b"{}") == 200


@pytest.mark.parametrize(
    ("was", "body", "now"),
    [
        (200, b'{"error":"Worker crashed","status":"failed"}', "E2105"),
        (200, b'{"error":"Failed to send request: Broken pipe","status":"failed"}', "E2105"),
        (409, b'{"error":"Already running"}', "E2107"),
        (503, b'{"error":"Setup has not finished yet."}', "E2105"),
        (200, b'{"error":"Prediction failed: no such thing","status":"failed"}', None),
        (200, b'{"output":["failed"],"status":"succeeded"}', None),
        (200, b'"failed"', None),
    ],
)
def test_coglets_own_refusals_get_a_code_and_503(was: int, body: bytes, now: str | None) -> None:
    found = decided(cog(), "POST", "/predictions", b"{}")
    assert isinstance(found, Forward)
    assert found.revise is not None
    revised = found.revise(was, body)
    if now is None:
        assert revised is None
    else:
        assert revised is not None
        assert revised.status == 503
        assert json.loads(revised.body)["error"].startswith(now)


@pytest.mark.parametrize(
    ("was", "body", "text"),
    [
        (400, b"Failed to parse the request body as JSON: a", "Failed to parse the request body"),
        (400, b"Invalid URL: Invalid UTF-8 in `id`\x1b", r"Invalid URL: Invalid UTF-8 in `id`\x1b"),
        (422, b'{"detail":[{"loc":["body","input","prompt"],"msg":"5 is"}]}', "input.prompt: 5 is"),
        (422, b'{"detail":{}}', ""),
        (422, b'{"detail":[' + b"1" * 5000 + b"]}", '{"detail":[111'),
    ],
)
def test_coglets_refusals_of_a_body_get_a_code(was: int, body: bytes, text: str) -> None:
    found = decided(cog(), "POST", "/predictions", b"{}")
    assert isinstance(found, Forward)
    assert found.revise is not None
    revised = found.revise(was, body)
    assert revised is not None
    said = json.loads(revised.body)
    assert (revised.status, said["status"]) == (was, "failed")
    assert said["error"].startswith(f"E1005 InvalidArgument: {text}")
    assert len(said["error"]) < 1100
    assert ("detail" in said) is (b"loc" in body or b"{}" in body)


@pytest.mark.parametrize("words", ["", "Generator iteration error: A: ", "Async thing failed: A: "])
def test_the_code_of_a_failed_prediction_comes_first(words: str) -> None:
    found = decided(cog(), "PUT", "/predictions/a", b"{}")
    assert isinstance(found, Forward)
    assert found.revise is not None
    said = {"error": f"Prediction failed: {words}E1001 A: b", "id": "x", "status": "failed"}
    revised = found.revise(200, json.dumps(said, separators=(",", ":")).encode())
    assert revised is not None
    assert (revised.status, json.loads(revised.body)) == (200, {**said, "error": "E1001 A: b"})


def test_the_openai_port_is_guarded_but_for_health() -> None:
    assert status(openai(LOCKED), "GET", "/health") == 200
    for path in ("/v1/models", "/v1/", "/metrics", "/metrics/triton", "/openapi.json"):
        assert status(openai(LOCKED), "GET", path) == 401
        assert status(openai(LOCKED), "GET", path, b"", *KEY) == 200
        assert status(openai(), "GET", path) == 200
    found = decided(openai(LOCKED), "POST", "/v1/completions", b"{}")
    assert isinstance(found, Answer)
    assert json.loads(found.body)["error"]["code"] == "E1007"
    assert json.loads(found.body)["error"]["type"] == "authentication_error"
    assert (b"www-authenticate", b"Bearer") in found.headers


def test_metrics_may_be_left_open() -> None:
    for gate in (openai(LOCKED, metrics_public=True), metrics(LOCKED, metrics_public=True)):
        assert status(gate, "GET", "/metrics") == 200
        assert status(gate, "POST", "/v1/completions") in (401, 404)
    assert status(metrics(LOCKED), "GET", "/metrics") == 401
    assert status(metrics(), "GET", "/metrics") == 200
    assert status(metrics(LOCKED), "GET", "/health") == 200
    for method, path in (("GET", "/v1/models"), ("GET", "/v2"), ("POST", "/metrics")):
        assert status(metrics(), method, path) == 404


@pytest.mark.parametrize("gate", [cog(), openai()])
def test_depth_is_bounded_on_every_port(gate: Any) -> None:
    path = "/predictions" if isinstance(gate, CogGate) else "/v1/completions"
    assert status(gate, "POST", path, b"[" * 200_000) == 400
    assert status(gate, "POST", path, b'{"prompt":"' + b"[{" * 500 + b'"}') == 200


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_adapters_are_changed_with_a_key_alone(path: str) -> None:
    without = OpenAIGate(
        route_to(), Access(None, loopback=True), LIMITS, BODIES, metrics_public=False
    )
    local = (b"content-type", b"application/json")
    answer = decided(without, "POST", path, b"{}", local)
    assert isinstance(answer, Answer)
    assert (answer.status, b"COG_TRITON_API_KEY is set" in answer.body) == (401, True)
    locked = OpenAIGate(route_to(), LOCKED, LIMITS, BODIES, metrics_public=False)
    assert status(locked, "POST", path, b"{}") == 401
    assert status(locked, "POST", path, b"{}", *KEY) == 200


def test_unknown_inputs_of_predictions_are_refused_or_noted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = cog()
    gate.route.upstream.state._inputs = frozenset({"prompt"})
    for method, path in (("POST", "/predictions"), ("PUT", "/predictions/a")):
        for body in (b'{"input":{"promt":"a"}}', b'{"input":{"prompt":"a","tools":[1]}}'):
            assert status(gate, method, path, body) == 400
        assert status(gate, method, path, b'{"input":{"prompt":"a","\\u001bweird":1}}') == 200
    assert caplog.text.count("of predictions is unknown, and ignored") == 1
    assert "\x1b" not in caplog.text


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
