"""Gates of the door: what passes to Cog, the OpenAI API and metrics, and how refusals look."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from backports import zstd
from prometheus_client.parser import text_string_to_metric_families
from small_door import KEY, LIMITS, LOCKED, OPEN, answered, passed, revised, route_to, status

from cog_triton.door.access import Access
from cog_triton.door.cog_gate import CogGate, unknown_inputs, without_nulls
from cog_triton.door.gate import MetricsGate, OpenAIGate
from cog_triton.door.keyring import Key, Keyring, sha256_of
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.message import Forward, Refused, Request
from cog_triton.door.webhook_relay import WebhookRelay, WebhookRules
from cog_triton.errors import InvalidArgument, Unauthorized
from cog_triton.serving.tenants import MOST_TENANTS


def cog(access: Access = OPEN, health: dict[str, Any] | None = None) -> CogGate:
    route = route_to(**(health or {"status": "READY"}))
    return CogGate(route, access, LIMITS, BODIES, WebhookRelay(WebhookRules()))


BODIES = LargeBodies()


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    BODIES.close()


def openai(access: Access = OPEN, *, metrics_public: bool = False) -> OpenAIGate:
    return OpenAIGate(route_to(8080), access, LIMITS, BODIES, metrics_public=metrics_public)


def metrics(access: Access = OPEN, *, metrics_public: bool = False) -> MetricsGate:
    return MetricsGate(route_to(8002), access, LIMITS, BODIES, metrics_public=metrics_public)


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
    found = answered(cog(), method, path, b"{}")
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
        found = answered(gate, method, path, b'{"input":{}}', accept)
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
    asked = (cog(), "POST", "/predictions", b'{"input":{}}', *headers)
    if code == 200:
        assert [value for name, value in passed(*asked).headers if name == b"content-type"] == [
            kind[0] if kind and kind[0] else b"application/json"
        ]
    else:
        assert answered(*asked).status == code
        assert b"E1005 InvalidArgument: Content-Type: " in answered(*asked).body


def test_docs_that_cogs_index_names_are_the_schema() -> None:
    found = answered(cog(), "GET", "/docs")
    assert (found.status, found.headers) == (307, ((b"location", b"/openapi.json"),))


def test_webhooks_to_private_addresses_are_refused_before_anything_runs() -> None:
    for url in (b'"http://169.254.169.254/"', b'"http://127.0.0.1:9/"', b'"ftp://a/"', b"7"):
        body = b'{"input":{"prompt":"\\"webhook\\""},"webhook":%s}' % url
        found = answered(cog(), "POST", "/predictions", body)
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
    found = passed(cog(), "PUT", "/predictions/a", body)
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
        found = answered(cog(), "POST", "/predictions", body.encode())
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


@pytest.mark.parametrize("body", [b"", b"{}", b'{"id":null}', b'{"input":{"id":"a"}}'])
def test_a_prediction_without_an_id_gets_one(body: bytes) -> None:
    sent = [passed(cog(), "POST", "/predictions?a=/predictions", body) for _ in "12"]
    assert {one.method for one in sent} == {"PUT"}
    targets = {one.target for one in sent}
    assert len(targets) == 2
    for target in targets:
        assert re.fullmatch(rb"/predictions/pred_[0-9a-f]{16}\?a=/predictions", target)
    named = passed(cog(), "POST", "/predictions", b'{"id":"a"}')
    assert (named.method, named.target) == ("POST", b"/predictions")


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
        (503, b'{"error":"E2106 TritonStartFailed: no Cog","status":"failed"}', None),
        (200, b'{"error":"Prediction failed: no such thing","status":"failed"}', None),
        (200, b'{"output":["failed"],"status":"succeeded"}', None),
        (200, b'"failed"', None),
    ],
)
def test_coglets_own_refusals_get_a_code_and_503(was: int, body: bytes, now: str | None) -> None:
    found = revised(passed(cog(), "POST", "/predictions", b"{}"), was, body)
    if now is None:
        assert found is None
    else:
        assert found is not None
        assert found.status == 503
        assert json.loads(found.body)["error"].startswith(now)


@pytest.mark.parametrize(
    ("was", "body", "text"),
    [
        (400, b"Failed to parse the request body as JSON: input.?: a", "body: not JSON: a"),
        (400, b"Invalid URL: Invalid UTF-8 in `id`\x1b", r"Invalid URL: Invalid UTF-8 in `id`\x1b"),
        (422, b'{"detail":[{"loc":["body","input","prompt"],"msg":"5 is"}]}', "input.prompt: 5 is"),
        (422, b'{"detail":{}}', ""),
        (422, b'{"detail":[' + b"1" * 5000 + b"]}", '{"detail":[111'),
    ],
)
def test_coglets_refusals_of_a_body_get_a_code(was: int, body: bytes, text: str) -> None:
    found = revised(passed(cog(), "POST", "/predictions", b"{}"), was, body)
    assert found is not None
    said = json.loads(found.body)
    assert (found.status, said["status"]) == (was, "failed")
    assert said["error"].startswith(f"E1005 InvalidArgument: {text}")
    assert len(said["error"]) < 1100
    assert ("detail" in said) is (b"loc" in body or b"{}" in body)


@pytest.mark.parametrize("words", ["", "Generator iteration error: A: ", "Async thing failed: A: "])
def test_the_code_of_a_failed_prediction_comes_first(words: str) -> None:
    said = {"error": f"Prediction failed: {words}E1001 A: b", "id": "x", "status": "failed"}
    body = json.dumps(said, separators=(",", ":")).encode()
    found = revised(passed(cog(), "PUT", "/predictions/a", b"{}"), 200, body)
    assert found is not None
    assert (found.status, json.loads(found.body)) == (200, {**said, "error": "E1001 A: b"})


def test_the_openai_port_is_guarded_but_for_health() -> None:
    assert status(openai(LOCKED), "GET", "/health") == 200
    for path in ("/v1/models", "/v1/", "/metrics", "/metrics/triton", "/openapi.json"):
        assert status(openai(LOCKED), "GET", path) == 401
        assert status(openai(LOCKED), "GET", path, b"", *KEY) == 200
        assert status(openai(), "GET", path) == 200
    found = answered(openai(LOCKED), "POST", "/v1/completions", b"{}")
    assert json.loads(found.body)["error"]["code"] == "invalid_api_key"
    assert (b"x-error-code", b"E1007") in found.headers
    assert json.loads(found.body)["error"]["type"] == "authentication_error"
    assert (b"www-authenticate", b"Bearer") in found.headers


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/x"])
def test_refusals_of_messages_are_in_anthropics_shape(path: str) -> None:
    gate = openai(LOCKED)
    found = json.loads(gate.refusal(401, Unauthorized("no"), path).body)
    error = {"type": "authentication_error", "message": "E1007 Unauthorized: no"}
    assert found == {"type": "error", "error": error}
    assert "code" in json.loads(gate.refusal(401, Unauthorized("no"), "/v1/message").body)["error"]


def test_broken_streams_of_messages_end_with_anthropics_event() -> None:
    headers = [(b"x-api-key", b"key"), (b"anthropic-version", b"2023-06-01")]
    request = Request("POST", b"/v1/messages", headers, b'{"model": "m"}')
    forward = asyncio.run(openai(LOCKED).decide(request))
    assert isinstance(forward, Forward)
    name, _, data = forward.cut.partition(b"\ndata: ")
    assert name == b"event: error"
    assert json.loads(data)["error"]["type"] == "overloaded_error"
    # The key stays in the door.
    assert [name for name, _ in forward.headers] == [b"anthropic-version"]


def test_refusals_are_counted_by_status_and_by_tenants_of_the_keyring(tmp_path: Path) -> None:
    keys = [Key(name=f"t{n}", sha256=sha256_of(b"k%d" % n)) for n in range(MOST_TENANTS + 5)]
    past = Key(name="past", sha256=sha256_of(b"past"), expires=datetime(2020, 1, 1, tzinfo=UTC))
    lines = [key.model_dump_json(exclude_defaults=True) for key in (past, *keys)]
    (tmp_path / "keys").write_text("\n".join(lines))
    gate = openai(Access("own", False, Keyring(tmp_path / "keys", "own")), metrics_public=True)

    def asked(key: str) -> int:
        return status(gate, "GET", "/metrics/x", b"", (b"authorization", f"Bearer {key}".encode()))

    def told() -> dict[tuple[str, str], float]:
        forward = passed(gate, "GET", "/metrics")
        assert forward.revise is not None
        assert forward.revise(500, b"") is None
        revised = forward.revise(200, b"# TYPE a gauge\na 1.0\n")
        assert revised is not None
        families = {f.name: f for f in text_string_to_metric_families(revised.body.decode())}
        assert families["a"].samples[0].value == 1
        samples = families["cog_triton_door_refused"].samples
        return {(s.labels["status"], s.labels["tenant"]): s.value for s in samples}

    assert told() == {}
    assert [asked("wrong"), asked("past"), asked("own")] == [401, 401, 200]
    assert told() == {("401", ""): 1, ("401", "past"): 1}
    for number in range(len(keys)):
        sent = [(b"authorization", b"Bearer k%d" % number)]
        with pytest.raises(Refused) as caught:
            gate.access.check(Request("GET", b"/", sent, b""), "admin")
        gate.access.refusals.count(caught.value)
    counts = told()
    assert counts["403", "t0"] == 1
    assert counts["403", "other"] == 6
    assert len(counts) == MOST_TENANTS + 2
    open_to_all = passed(openai(), "GET", "/metrics")
    assert open_to_all.revise is not None
    assert open_to_all.revise(200, b"a 1\n") is None


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


@pytest.mark.parametrize("gate", [cog(), openai()])
def test_compressed_bodies_are_decoded_within_the_limit(gate: Any) -> None:
    path = "/predictions" if isinstance(gate, CogGate) else "/v1/completions"
    body = b'{"input": {"prompt": "Hi."}}'
    for name, compress in (
        (b"gzip", gzip.compress),
        (b"deflate", zlib.compress),
        (b"ZSTD", zstd.compress),
    ):
        header = (b"content-encoding", name)
        forward = passed(gate, "POST", path, compress(body), header)
        assert forward.encoded().endswith(
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
        )
        assert header[0] not in dict(forward.headers)
        assert status(gate, "POST", path, compress(b" " * 100 * LIMITS.body_bytes), header) == 413
        plain = answered(gate, "POST", path, body, header)
        assert (plain.status, b"body: not %b, which" % name.lower() in plain.body) == (400, True)
        assert status(gate, "POST", path, compress(body)[:-1], header) == 400
    refused = answered(gate, "POST", path, body, (b"content-encoding", b"br"))
    assert (refused.status, b"E1005 InvalidArgument: Content-Encoding='br'" in refused.body) == (
        415,
        True,
    )
    full = Request("POST", path.encode(), [header], compress(body), take_bytes=lambda _: False)
    with pytest.raises(Refused, match="hold all memory"):
        asyncio.run(gate.decide(full))


def test_a_slash_at_the_end_is_routed() -> None:
    for sent, target in {
        "/v1/models/?a=/": b"/v1/models?a=/",
        "/v1/chat/completions//": b"/v1/chat/completions",
        "/v1/models/a%2Fb%20c": b"/v1/models/a/b%20c",
        "/metrics/": b"/metrics/",
    }.items():
        assert passed(openai(), "GET", sent).target == target


ADAPTERS = [
    "load_lora_adapter",
    "unload_lora_adapter",
    "load_lora_adapter/",
    "load%5Flora_adapter%2f",
]


@pytest.mark.parametrize("path", [f"/v1/{name}" for name in ADAPTERS])
def test_adapters_are_changed_with_a_key_alone(path: str) -> None:
    local = (b"content-type", b"application/json")
    answer = answered(openai(Access(None, loopback=True)), "POST", path, b"{}", local)
    assert (answer.status, b"COG_TRITON_API_KEY is set" in answer.body) == (401, True)
    assert status(openai(LOCKED), "POST", path, b"{}") == 401
    assert status(openai(LOCKED), "POST", path, b"{}", *KEY) == 200


def test_unknown_inputs_of_predictions_are_refused_or_noted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = cog()
    gate.route.upstream.state._inputs = frozenset({"prompt"})
    for method, path in (("POST", "/predictions"), ("PUT", "/predictions/a")):
        assert status(gate, method, path, b'{"input":{"prompt":"a","tools":[1]}}') == 400
        assert status(gate, method, path, b'{"input":{"prompt":"a","\\u001bweird":1}}') == 200
    assert caplog.text.count("of predictions is unknown, and ignored") == 1
    assert "\x1b" not in caplog.text


KNOWN = frozenset({"prompt", "max_tokens", "stop_sequences", "seed", "messages", "system_prompt"})


def names(inputs: Any, known: frozenset[str] = KNOWN) -> list[str]:
    return unknown_inputs(json.dumps({"input": inputs}).encode(), known)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools: not an input of predictions; /v1/chat"),
        ({"image": "data:image/png;base64,AA=="}, "image: not an input of predictions; /v1/chat"),
        ({"images": ["a"]}, "images: not an input"),
        ({"stop": ["a"]}, "stop: not an input of predictions; use stop_sequences"),
        ({"logit_bias": {"1": 2}}, "logit_bias: not an input"),
    ],
)
def test_what_would_change_the_text_is_refused(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        names(inputs)
    assert words in caught.value.detail
    assert len(caught.value.detail) < 300


def test_other_unknown_inputs_are_named_for_the_log() -> None:
    assert names({"prompt": "a", "seed": 1}) == []
    assert names({"promt": "a", "debug": True, "x" * 200: 1}) == ["promt", "debug", "x" * 80]
    assert names({"tools": [], "images": None, "stop": "", "n": False}) == []
    assert len(names({f"{place}{'q' * 30}": 1 for place in range(9999)})) == 20


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        (
            '{"id": null, "input": {"a": null, "seed": 2.0, "é": [null]}}',
            '{"id":null,"input":{"seed":2.0,"é":[null]}}',
        ),
        ('{"input": {"a": null, "b": 1e999}}', None),
        ('{"input": [null]}', None),
        ("[null", None),
    ],
)
def test_inputs_that_are_null_are_absent(body: str, passed: str | None) -> None:
    assert without_nulls(body.encode()).decode() == (passed or body)


def test_a_builder_has_inputs_of_its_own() -> None:
    assert names({"config": "a", "images": 1}, frozenset({"config"})) == ["images"]


@pytest.mark.parametrize(
    "body", [b"", b"nothing", b"[]", b"{}", b'{"input": []}', b'{"input": null}', b"[" * 9999]
)
def test_other_bodies_are_left_to_coglet(body: bytes) -> None:
    assert unknown_inputs(body, KNOWN) == []
