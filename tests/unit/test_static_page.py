"""The page at `/`: what it may do, what it weighs, who may have it."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re

import pytest
from small_door import LOCKED, OPEN, route_to

from cog_triton.door.access import Access
from cog_triton.door.cog_gate import CogGate
from cog_triton.door.gate import PAGE, MetricsGate, OpenAIGate
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.message import Answer, Forward, Refused, Request
from cog_triton.door.request_parser import Limits
from cog_triton.door.webhook_relay import WebhookRelay, WebhookRules

LOCAL = Access(None, loopback=True)
TEXT = PAGE.body.decode()


def gate(access: Access, kind: type[OpenAIGate] = OpenAIGate, *, page: bool = True) -> OpenAIGate:
    return kind(route_to(8080), access, Limits(), LargeBodies(), metrics_public=False, page=page)


def status(found: OpenAIGate, asked: str, host: bytes = b"127.0.0.1:8080") -> int:
    """Of the gate's own answer; 0 for what it forwards."""
    method, path = asked.split(" ")
    request = Request(method, path.encode(), [(b"host", host)], b"")
    try:
        decided = asyncio.run(found.decide(request))
    except Refused as refused:
        return refused.status
    return decided.status if isinstance(decided, Answer) else 0


@pytest.mark.parametrize("access", [OPEN, LOCAL, LOCKED])
@pytest.mark.parametrize("asked", ["GET /", "HEAD /", "GET /?a=b"])
def test_the_page_is_open(access: Access, asked: str) -> None:
    assert status(gate(access), asked) == 200


@pytest.mark.parametrize(
    "asked", ["POST /", "GET //", "GET /.", "GET /index.html", "GET /v1/models", "GET /metrics"]
)
def test_nothing_else_is_open_beside_it(asked: str) -> None:
    assert status(gate(LOCKED), asked) == 401


def test_it_can_be_off() -> None:
    assert status(gate(LOCKED, page=False), "GET /") == 401
    assert status(gate(OPEN, page=False), "GET /") == 0


def test_it_is_not_for_rebound_names_nor_on_the_port_of_metrics() -> None:
    assert status(gate(LOCAL), "GET /", b"evil.example") == 403
    assert status(gate(OPEN, MetricsGate), "GET /") == 404


def test_cogs_index_names_it() -> None:
    def index(page_port: int | None) -> Answer | None:
        cog = CogGate(
            route_to(),
            OPEN,
            Limits(),
            LargeBodies(),
            WebhookRelay(WebhookRules()),
            page_port=page_port,
        )
        request = Request("GET", b"/", [(b"host", b"gpu-1:5000")], b"")
        decided = asyncio.run(cog.decide(request))
        assert isinstance(decided, Forward)
        return decided.revise(200, b'{"docs_url":"/docs"}') if decided.revise else None

    answer = index(8080)
    assert answer
    assert answer.body == b'{"docs_url":"/docs","page_url":"http://gpu-1:8080/"}'
    assert index(None) is None


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


def test_every_control_has_a_name() -> None:
    labelled = set(re.findall(r'<label[^>]* for="(\w+)"', TEXT))
    controls = re.findall(r"<(?:input|select|textarea)\b([^>]*)>", TEXT)
    named = [match[1] for found in controls if (match := re.search(r'\bid="(\w+)"', found))]
    assert set(named) <= labelled
    assert all('type="radio"' in found for found in controls if "id=" not in found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(scheme: str) -> None:
    light, dark = re.findall(r":root \{(.*?)\n *\}", TEXT, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light if scheme == "light" else dark))
    if scheme == "dark":
        colours = {**dict(re.findall(r"--([\w-]+): (#\w{6})", light)), **colours}
    for front, back, least in (
        *(("text", back, 7) for back in ("bg", "panel", "bubble", "code", "bad-bg")),
        *(("dim", back, 4.5) for back in ("bg", "panel")),
        ("on-accent", "accent", 4.5),
        ("accent", "bg", 4.5),
        ("bad", "bad-bg", 4.5),
        *(("edge", back, 3) for back in ("bg", "panel")),
        *((dot, "bg", 3) for dot in ("ok", "wait", "bad")),
    ):
        assert _contrast(colours[front], colours[back]) >= least, (front, back)


def _contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
