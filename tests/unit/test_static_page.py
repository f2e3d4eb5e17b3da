"""The page at `/`: what it may do, what it weighs, who may have it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re

import pytest
from small_front import LOCKED, OPEN, decided, nothing, route_to

from cog_triton.front.access import Access
from cog_triton.front.gate import PAGE, MetricsGate, OpenAIGate
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.message import Answer, Limits

LOCAL = Access(None, loopback=True)
TEXT = PAGE.body.decode()


def gate(access: Access, kind: type[OpenAIGate] = OpenAIGate, *, page: bool = True) -> OpenAIGate:
    common = (*route_to(), access, Limits(), LargeBodies())
    return kind(*common, metrics_public=False, app=nothing, page=page)


def status(found: OpenAIGate, asked: str, host: bytes = b"127.0.0.1:8080") -> int:
    """Of the gate's own answer; 0 for what passes."""
    answer = decided(found, *asked.split(" "), b"", (b"host", host))
    return answer.status if isinstance(answer, Answer) else 0


@pytest.mark.parametrize("asked", ["GET /", "HEAD /", "GET /?a=b"])
def test_the_page_is_open(asked: str) -> None:
    assert [status(gate(access), asked) for access in (OPEN, LOCAL, LOCKED)] == [200] * 3


def test_it_can_be_off() -> None:
    assert status(gate(LOCKED, page=False), "GET /") == 401
    assert status(gate(OPEN, page=False), "GET /") == 0


def test_it_is_not_for_rebound_names_nor_on_the_port_of_metrics() -> None:
    assert status(gate(LOCAL), "GET /", b"evil.example") == 403
    assert status(gate(OPEN, MetricsGate), "GET /") == 404


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


@pytest.mark.parametrize("schemes", [1, 2])
def test_text_stands_out(schemes: int) -> None:
    """Of the dark scheme, too, which changes colours of the light one."""
    found = re.findall(r":root \{(.*?)\n *\}", TEXT, re.DOTALL)[:schemes]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", "".join(found)))
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
        parts = [part / 255 for part in bytes.fromhex(colour[1:])]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
