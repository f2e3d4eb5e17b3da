"""Tenants by API and way to ask: whoever has a key has its rights, limits and bill on each of them.

What generates is asked of the mock, embeddings of the double of vLLM; both behind the real front,
Cog and Triton.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from stack import Stack
from test_embeddings import MODEL as EMBEDDER
from test_embeddings import EmbeddingStack

from cog_triton.cli.accounts import summed
from cog_triton.front.keyring import sha256_of

pytestmark = [pytest.mark.integration, pytest.mark.full]

MODEL = "m"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
LONG_TEXT = "word " * 100
MADE = 3
_TOKENS = r'cog_triton_tenant_{}_tokens_total\{{tenant="{}"\}} (\S+)'


@dataclass(frozen=True)
class Way:
    """A way to ask: a path with a body, and that with a long prompt."""

    path: str
    body: dict[str, Any]
    long: dict[str, Any]
    api: str = "openai"
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    made: int = MADE
    """Tokens of its answer."""
    unbilled: bool = False
    """Whether no engine is asked."""


def _input(**values: Any) -> dict[str, Any]:
    return {"input": {"max_tokens": MADE, **values}}


_LONG_CHAT = {**CHAT, "messages": [{"role": "user", "content": LONG_TEXT}]}
_EVENTS = {"accept": "text/event-stream"}
_PREDICTED: dict[str, Any] = {
    "body": _input(prompt="Hi"),
    "long": _input(prompt=LONG_TEXT),
    "api": "predictions",
}


def _openai(path: str, field: str, **more: Any) -> Way:
    own = {"model": MODEL, **more}
    return Way(path, {**own, field: "Hi"}, {**own, field: LONG_TEXT})


def _chat(path: str, limit: str, **more: Any) -> Way:
    return Way(path, {**CHAT, limit: MADE, **more}, {**_LONG_CHAT, limit: MADE, **more})


WAYS = {
    "chat": _chat("/v1/chat/completions", "max_tokens"),
    "chat-stream": _chat("/v1/chat/completions", "max_completion_tokens", stream=True),
    "completions": _openai("/v1/completions", "prompt", max_tokens=MADE),
    "completions-stream": _openai("/v1/completions", "prompt", max_tokens=MADE, stream=True),
    "responses": _openai("/v1/responses", "input", max_output_tokens=MADE),
    "responses-stream": _openai("/v1/responses", "input", max_output_tokens=MADE, stream=True),
    "messages": _chat("/v1/messages", "max_tokens"),
    "messages-stream": _chat("/v1/messages", "max_tokens", stream=True),
    "count": Way("/v1/messages/count_tokens", CHAT, _LONG_CHAT, unbilled=True),
    "tokenize": replace(_openai("/tokenize", "prompt"), unbilled=True),
    "embeddings": replace(_openai("/v1/embeddings", "input", model=EMBEDDER), made=0),
    "predictions": Way("/predictions", **_PREDICTED),
    "predictions-stream": Way("/predictions", headers=_EVENTS, **_PREDICTED),
    "predictions-put": Way("/predictions/{}", method="PUT", **_PREDICTED),
}
BILLED = [name for name, way in WAYS.items() if not way.unbilled]


def lines() -> Iterator[str]:
    """Keys: of each way those that have no right for it, or few of something."""

    def key(name: str, **values: Any) -> str:
        return json.dumps({"name": name, "sha256": sha256_of(name.encode()), **values})

    every = ["predictions", "openai", "triton", "metrics", "adapters", "admin"]
    yield key("root", apis=every)
    for way, how in WAYS.items():
        yield key(f"{way}.usual")
        yield key(f"{way}.barred", apis=[each for each in every if each != how.api])
        yield key(f"{way}.elsewhere", models=["other"])
        yield key(f"{way}.seldom", requests_per_minute=1)
        yield key(f"{way}.spent", tokens_per_minute=1)
        yield key(f"{way}.brief", max_prompt_tokens=40)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, Stack]]:
    """By whether embeddings are what it makes."""
    directory = tmp_path_factory.mktemp("everywhere")
    keys = directory / "keys"
    keys.write_text("\n".join(lines()))
    common = {"COG_TRITON_KEYS": str(keys), "LOG_FORMAT": "json", "RESPONSE_STORE_BYTES": "100000"}
    mock = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "0", "SERVED_MODEL_NAME": MODEL, **common}
    with ExitStack() as started:
        embedding = EmbeddingStack(directory / "embedding", **common)
        generating = Stack(directory / "work", None, **mock)
        yield {
            False: started.enter_context(generating.served()),
            True: started.enter_context(embedding.served()),
        }


@dataclass
class Asked:
    """A way, on the server that has it."""

    name: str
    way: Way
    stack: Stack

    def ask(self, tenant: str, *, long: bool = False) -> httpx.Response:
        """The answer to a tenant of this way; "" sends no key."""
        own = self.stack.url if self.way.api == "predictions" else self.stack.own
        headers = {"authorization": f"Bearer {self.name}.{tenant}"} if tenant else {}
        return httpx.request(
            self.way.method,
            own + self.way.path.format(f"{self.name}-{tenant}"),
            json=self.way.long if long else self.way.body,
            headers={**headers, **self.way.headers},
            timeout=60,
        )

    def refusal(self, tenant: str, *, long: bool = False) -> str:
        """The code of an answer that is none; predictions that have begun tell it with 200."""
        answer = self.ask(tenant, long=long)
        codes: list[str] = re.findall(r"\bE[12]\d{3}\b", answer.text)
        assert codes, (answer.status_code, answer.text)
        return codes[0]

    def metric(self, pattern: str) -> float:
        """A sample of /metrics; 0 where there is none."""
        headers = {"authorization": "Bearer root"}
        text = httpx.get(f"{self.stack.own}/metrics", headers=headers).text
        return sum(map(float, re.findall(pattern, text)))


@pytest.fixture(params=WAYS)
def asked(request: pytest.FixtureRequest, stacks: dict[bool, Stack]) -> Asked:
    name = request.param
    return Asked(name, WAYS[name], stacks[name == "embeddings"])


def test_a_key_is_asked_for_and_has_its_apis_and_models_alone(asked: Asked) -> None:
    assert asked.refusal("") == "E1007"
    assert asked.ask("").status_code == 401
    assert asked.refusal("barred") == "E1007"
    assert asked.ask("barred").status_code == 403
    assert asked.refusal("elsewhere") == "E1009"


def test_limits_of_requests_and_prompts_hold(asked: Asked) -> None:
    assert "E2107" not in asked.ask("seldom").text
    assert asked.refusal("seldom") == "E2107"
    if not asked.way.unbilled:
        assert asked.refusal("brief", long=True) == "E1002"
    assert not re.search(r"\bE[12]\d{3}\b", asked.ask("brief").text)


@pytest.mark.parametrize("asked", BILLED, indirect=True)
def test_tokens_are_limited_and_on_the_bill(asked: Asked) -> None:
    made, tenant = asked.way.made, f"{asked.name}.usual"
    for _ in range(2):
        assert asked.ask("usual").status_code == 200
    assert asked.metric(_TOKENS.format("generation", tenant)) == 2 * made
    assert (prompt := asked.metric(_TOKENS.format("prompt", tenant))) > 0
    requests = rf'cog_triton_tenant_requests_total\{{outcome="\w+",tenant="{tenant}"\}} (\S+)'
    assert asked.metric(requests) == 2
    used = summed(asked.stack.output.splitlines())[tenant]
    assert (used["requests"], used["prompt_tokens"], used["output_tokens"]) == (2, prompt, 2 * made)
    assert asked.ask("spent").status_code == 200
    assert asked.refusal("spent") == "E2107"
    refused = (
        rf'cog_triton_tenant_refused_total\{{code="E2107",tenant="{asked.name}.spent"\}} (\S+)'
    )
    assert asked.metric(refused) == 1


def test_models_are_listed_to_those_who_may_name_them(stacks: dict[bool, Stack]) -> None:
    def listed(tenant: str) -> list[str]:
        headers = {"authorization": f"Bearer chat.{tenant}"}
        body = httpx.get(f"{stacks[False].own}/v1/models", headers=headers).json()
        return [model["id"] for model in body["data"]]

    assert listed("usual") == [MODEL]
    assert listed("elsewhere") == []


def test_a_response_that_is_kept_is_its_tenants_alone(stacks: dict[bool, Stack]) -> None:
    ours = Asked("responses", WAYS["responses"], stacks[False])
    name = ours.ask("usual").json()["id"]
    for tenant, status in (("responses.usual", 200), ("messages.usual", 404)):
        headers = {"authorization": f"Bearer {tenant}"}
        found = httpx.get(f"{ours.stack.own}/v1/responses/{name}", headers=headers)
        assert found.status_code == status


@pytest.mark.parametrize("path", ["/v2", "/v2/models/ensemble/config", "/v2/models/stats"])
def test_tritons_own_api_is_for_its_right(stacks: dict[bool, Stack], path: str) -> None:
    for key, status in (("root", 200), ("chat.usual", 403), ("nobody", 401)):
        headers = {"authorization": f"Bearer {key}"}
        found = httpx.get(f"{stacks[False].triton}{path}", headers=headers)
        assert found.status_code == status
