"""Gates of the front: what passes to Cog, the OpenAI API and metrics, refusals, and the page."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from backports import zstd
from prometheus_client.parser import text_string_to_metric_families
from small_front import (
    KEY,
    LIMITS,
    LOCKED,
    OPEN,
    answered,
    decided,
    let_in,
    nothing,
    passed,
    revised,
    route_to,
    status,
)

from cog_triton.errors import InvalidArgument
from cog_triton.front.access import Access
from cog_triton.front.cog_gate import CogGate
from cog_triton.front.gate import PAGE, MetricsGate, OpenAIGate
from cog_triton.front.keyring import Key, Keyring, sha256_of
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.message import Answer, Limits, Refused, Request
from cog_triton.front.prediction_body import PreparedBody, prepared
from cog_triton.front.webhook_relay import WebhookRelay, WebhookRules
from cog_triton.serving.tenants import MOST_TENANTS


def cog(access: Access = OPEN, health: dict[str, Any] | None = None) -> CogGate:
    route = route_to(**(health or {"status": "READY"}))
    return CogGate(*route, access, LIMITS, BODIES, WebhookRelay(WebhookRules()))


BODIES = LargeBodies()


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    BODIES.close()


def openai(
    access: Access = OPEN, kind: type[OpenAIGate] = OpenAIGate, *, metrics_public: bool = False
) -> OpenAIGate:
    served = {"metrics_public": metrics_public, "app": nothing}
    return kind(*route_to(), access, LIMITS, BODIES, **served)


metrics = partial(openai, kind=MetricsGate)


@pytest.mark.parametrize(
    ("health", "code"),
    [
        ({"status": "STARTING"}, "E2105"),
        ({"status": "UNHEALTHY", "user_healthcheck_error": "channel closed"}, "E2105"),
        ({"status": "SETUP_FAILED", "setup": {"logs": "E1305 EngineIncompatible: sm_90"}}, "E1305"),
    ],
)
def test_predictions_are_a_coded_503_while_cog_cannot_take_them(
    health: dict[str, Any], code: str
) -> None:
    gate = cog()
    gate.upstream.state._take(health)
    accept = (b"accept", b"text/event-stream")
    for method, path in (("POST", "/predictions"), ("PUT", "/predictions/a")):
        found = answered(gate, method, path, b'{"input":{}}', accept)
        assert found.status == (400 if code.startswith("E1") else 503)
        assert json.loads(found.body)["error"].startswith(code)
        assert json.loads(found.body)["status"] == "failed"


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


def test_what_our_own_health_check_tells_is_told_by_the_prediction() -> None:
    reason = "E2105 TritonUnavailable: a"
    gate = cog(health={"status": "UNHEALTHY", "user_healthcheck_error": reason})
    assert status(gate, "POST", "/predictions", b"{}") == 200


@pytest.mark.parametrize(
    ("was", "body", "now"),
    [
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
        (400, b"Invalid URL: Invalid UTF-8 in `id`\x1b", r"Invalid URL: Invalid UTF-8 in `id`\x1b"),
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


def test_a_missing_key_is_refused_with_the_scheme_and_a_code() -> None:
    found = answered(openai(LOCKED), "POST", "/v1/completions", b"{}")
    assert found.status == 401
    assert {(b"www-authenticate", b"Bearer"), (b"x-error-code", b"E1007")} <= {*found.headers}
    assert status(openai(LOCKED), "GET", "/health") == 200


def test_the_key_stays_in_the_front() -> None:
    headers = [(b"x-api-key", b"key"), (b"anthropic-version", b"2023-06-01")]
    for sent in (headers, [*KEY, headers[1]]):
        request = let_in(openai(LOCKED), "POST", "/v1/messages", b'{"model": "m"}', *sent)
        assert request.headers == [headers[1]]
    assert passed(cog(LOCKED), "POST", "/predictions/a/cancel", b"", *headers).headers == [
        headers[1]
    ]


def test_refusals_are_counted_by_status_and_tenant(tmp_path: Path) -> None:
    keys = [Key(name=f"t{n}", sha256=sha256_of(b"k%d" % n)) for n in range(MOST_TENANTS + 5)]
    past = Key(name="past", sha256=sha256_of(b"past"), expires=datetime(2020, 1, 1, tzinfo=UTC))
    lines = [key.model_dump_json(exclude_defaults=True) for key in (past, *keys)]
    (tmp_path / "keys").write_text("\n".join(lines))
    gate = openai(Access("own", False, Keyring(tmp_path / "keys", "own")), metrics_public=True)
    triton = MetricsGate(*route_to(), gate.access, LIMITS, BODIES, metrics_public=True)

    def asked(key: str) -> int:
        return status(gate, "GET", "/metrics/x", b"", (b"authorization", f"Bearer {key}".encode()))

    def told() -> dict[tuple[str, str], float]:
        answer: Any = revised(passed(triton, "GET", "/metrics"), 200, b"a 1\n")
        _, family = text_string_to_metric_families(answer.body.decode())
        assert family.name == "cog_triton_door_refused"
        return {(s.labels["status"], s.labels["tenant"]): s.value for s in family.samples}

    assert told() == {}
    assert [asked("wrong"), asked("past"), asked("own")] == [401, 401, 200]
    assert told() == {("401", ""): 1, ("401", "past"): 1}
    for number in range(len(keys)):
        sent = [(b"authorization", b"Bearer k%d" % number)]
        with pytest.raises(Refused) as caught:
            gate.access.check(Request("GET", b"/", sent, b""), "admin")
        gate.access.refusals.count(caught.value)
    counts = told()
    assert (counts["403", "t0"], counts["403", "other"]) == (1, 6)
    assert len(counts) == MOST_TENANTS + 2


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
    take = passed if isinstance(gate, CogGate) else let_in
    ways = {b"gzip": gzip.compress, b"deflate": zlib.compress, b"ZSTD": zstd.compress}
    for name, compress in ways.items():
        header = (b"content-encoding", name)
        sent = take(gate, "POST", path, compress(body), header)
        assert sent.body == body
        assert header[0] not in dict(sent.headers)
        assert status(gate, "POST", path, compress(b" " * 100 * LIMITS.body_bytes), header) == 413
        plain = answered(gate, "POST", path, body, header)
        assert (plain.status, b"body: not %b, which" % name.lower() in plain.body) == (400, True)
        assert status(gate, "POST", path, compress(body)[:-1], header) == 400
    assert status(gate, "POST", path, body, (b"content-encoding", b"br")) == 415
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
        assert let_in(openai(), "GET", sent).target == target


KNOWN = frozenset({"prompt", "max_tokens", "stop_sequences", "seed", "messages", "system_prompt"})


def names(inputs: Any, known: frozenset[str] = KNOWN) -> list[str]:
    return prepared(json.dumps({"input": inputs}).encode(), known, "").unknown


def test_other_unknown_inputs_are_named_for_the_log() -> None:
    assert names({"prompt": "a", "seed": 1, "messages": [1] * 256}) == []
    assert names({"promt": "a", "debug": True, "x" * 200: 1}) == ["promt", "debug", "x" * 80]
    assert names({"tools": [], "images": None, "stop": "", "n": False, "promt": None}) == []
    assert len(names({f"{place}{'q' * 30}": 1 for place in range(9999)})) == 20
    assert names({"config": "a", "images": 1}, frozenset({"config"})) == ["images"]  # a builder's
    assert names({"images": 1}, frozenset()) == []


@pytest.mark.parametrize("body", [b"{nothing", b'{"input": []} {}', b'{"a":' * 9999, b'{"\xff'])
def test_other_bodies_are_left_to_coglet(body: bytes) -> None:
    for left in (body, b"", b'{"input": [null]}', b'{"input": {"prompt": "null"}, "id": null}'):
        assert prepared(left, KNOWN, "") == PreparedBody(left)
    for hidden in (body + b'"webhook"', body + b"\\u", body + b"," * 257):
        with pytest.raises(InvalidArgument, match="body: not JSON"):
            prepared(hidden, KNOWN, "")


LOCAL = Access(None, loopback=True)
TEXT = PAGE.body.decode()


def gate(access: Access, kind: type[OpenAIGate] = OpenAIGate, *, page: bool = True) -> OpenAIGate:
    common = (*route_to(), access, Limits(), LargeBodies())
    return kind(*common, metrics_public=False, app=nothing, page=page)


def page_status(found: OpenAIGate, asked: str, host: bytes = b"127.0.0.1:8080") -> int:
    """Of the gate's own answer; 0 for what passes."""
    answer = decided(found, *asked.split(" "), b"", (b"host", host))
    return answer.status if isinstance(answer, Answer) else 0


@pytest.mark.parametrize("asked", ["GET /", "HEAD /", "GET /?a=b"])
def test_the_page_is_open(asked: str) -> None:
    assert [page_status(gate(access), asked) for access in (OPEN, LOCAL, LOCKED)] == [200] * 3


def test_it_can_be_off() -> None:
    assert page_status(gate(LOCKED, page=False), "GET /") == 401
    assert page_status(gate(OPEN, page=False), "GET /") == 0


def test_it_is_not_for_rebound_names_nor_on_the_port_of_metrics() -> None:
    assert page_status(gate(LOCAL), "GET /", b"evil.example") == 403
    assert page_status(gate(OPEN, MetricsGate), "GET /") == 404


def test_it_is_small_and_asks_no_other_host() -> None:
    assert len(gzip.compress(PAGE.body)) < 60_000
    found = set(re.findall(r"\bhttps?://[^\s\"'`]*|(?<![:\w])//[\w.]+\.\w+", TEXT))
    assert found == {"http://www.w3.org/2000/svg"}


def test_its_policy_lets_run_what_is_in_it_alone() -> None:
    policy = dict(PAGE.headers)[b"content-security-policy"].decode()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag in ("script", "style"):
        (inline,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", TEXT, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in policy
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\.cookie", TEXT
    )
    assert not re.search(r"<[^>]+\s(style|on\w+)=", TEXT)
