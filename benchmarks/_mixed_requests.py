"""Random requests of every kind, and how each ended: the load of `soak_mixed`."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import httpx
from _servers import Server

from cog_triton import errors

DIRECT = ("ensemble", "tensorrt_llm_bls")
"""Models of Triton's own API, which the server's metrics do not count."""
KINDS = ("predictions", "predictions, whole", "chat", "chat, whole", "completions", *DIRECT)
PATIENCE_S = 300
_WORDS = [
    "the",
    "sky",
    "is",
    "blue",
    "and",
    "rivers",
    "run",
    "to",
    "seas",
    "while",
    "people",
    "talk",
]
_BAD: list[dict[str, Any]] = [
    {"temperature": -1},
    {"max_tokens": 0},
    {"top_p": "all"},
    {"messages": [{"role": "nobody", "content": "Hi"}]},
    {"max_tokens": "many"},
]
_BAD_SHARE, _LEAVING_SHARE, _LONG_SHARE = 0.05, 0.25, 0.01
_LONG_WORDS = 4000


class Client:
    """Client that sends random requests one after another, and classifies how each ended."""

    def __init__(
        self, server: Server, http: httpx.AsyncClient, model: str, seed: int, max_words: int
    ) -> None:
        """`max_words` bounds prompts; one of a hundred is as long as that, up to 4000 words."""
        self._server = server
        self._http = http
        self._model = model
        self._random = random.Random(seed)
        self._long = min(max_words, _LONG_WORDS)

    async def one(self) -> tuple[str, str]:
        """Send one request; returns its kind and how it ended."""
        chance = self._random
        kind = chance.choice(KINDS)
        bad = kind not in DIRECT and chance.random() < _BAD_SHARE
        leaves = not bad and chance.random() < _LEAVING_SHARE
        url, body, headers = self._request(kind, bad, at_least=200 if leaves else 1)
        try:
            sending = self._send(url, body, headers, leaves)
            outcome = await asyncio.wait_for(sending, PATIENCE_S)
        except TimeoutError:
            outcome = f"LOST: nothing for {PATIENCE_S} s"
        except httpx.HTTPError as error:
            outcome = f"LOST: {error!r}"
        if bad and not outcome.startswith(("E1", "422")):
            outcome = f"LOST: bad input was answered {outcome}"
        return kind, outcome

    async def pause(self, mean_s: float) -> None:
        """Wait for an exponentially distributed time."""
        if mean_s:
            await asyncio.sleep(self._random.expovariate(1 / mean_s))

    def _request(
        self, kind: str, bad: bool, at_least: int
    ) -> tuple[str, dict[str, Any], dict[str, str]]:
        chance = self._random
        words = int(chance.expovariate(1 / 60)) + 1
        if chance.random() < _LONG_SHARE:
            words = self._long
        prompt = " ".join(chance.choices(_WORDS, k=min(words, self._long)))
        values: dict[str, Any] = {
            "max_tokens": min(int(chance.expovariate(1 / 40)) + at_least, 400),
            "temperature": chance.choice([0, 0.7, 1]),
        }
        if kind in DIRECT:
            body = {"text_input": prompt, "stream": True, **values}
            return f"{self._server.triton}/v2/models/{kind}/generate_stream", body, {}
        if at_least > 1:
            values["min_tokens"] = at_least
        elif chance.random() < 0.2:
            values["stop" if kind[0] == "c" else "stop_sequences"] = "and"
        wrong = chance.choice(_BAD) if bad else {}
        if kind.startswith("predictions"):
            headers = {} if kind.endswith("whole") else {"Accept": "text/event-stream"}
            body = {"input": {"prompt": prompt, **values, **wrong}}
            return f"{self._server.url}/predictions", body, headers
        url = f"{self._server.openai}/v1"
        body = {"model": self._model, "stream": not kind.endswith("whole"), **values}
        if kind == "completions":
            return f"{url}/completions", {**body, "prompt": prompt, **wrong}, {}
        chat = {"messages": [{"role": "user", "content": prompt}]}
        return f"{url}/chat/completions", {**body, **chat, **wrong}, {}

    async def _send(
        self, url: str, body: dict[str, Any], headers: dict[str, str], leaves: bool
    ) -> str:
        reading = self._read(url, body, headers)
        if not leaves:
            return await reading
        try:
            return await asyncio.wait_for(reading, self._random.random() * 3)
        except TimeoutError:
            return "left"

    async def _read(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> str:
        async with self._http.stream("POST", url, json=body, headers=headers) as answer:
            text = "".join([chunk async for chunk in answer.aiter_text()])
        if url.startswith(self._server.triton):
            answered = answer.status_code == 200 and '"text_output"' in text
            if answered and '"error"' not in text:
                return "answered"
        return _ended(answer.status_code, text)


def _ended(status: int, text: str) -> str:
    """How a request ended: ``stop``, ``length``, a code, or a description."""
    error = errors.from_text(text)
    if error is not None:
        return error.code
    if status == 422:
        return "422"
    reasons = re.findall(r'"finish_reason":"(stop|length)"', text)
    complete = "data: [DONE]" in text or '"usage":{' in text or '"status":"succeeded"' in text
    if status == 200 and reasons and complete:
        return str(reasons[-1])
    return f"LOST: HTTP {status} {text[-200:]!r}"
