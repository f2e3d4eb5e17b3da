"""Many streams at once, read by the load client of ``cog-triton bench``, and a kill under them.

Two runs may part where the two likeliest tokens are nearly as likely, since a prompt's sums are
others than those of steps. `Told.fault_of` says whether a difference is more than that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_servers import PATIENCE_S, Server
from stack import wait_until

from cog_triton.bench.http_client import BufferedResponse, Client, TransportError, encode_request

NEAR = 0.1
"""In nats: the most that rounding may move a log probability, or a near tie be apart."""
TOKENS, TOP = 256, 20
GREEDY = {"temperature": 0, "ignore_eos": True}
Asked = tuple[str, Mapping[str, Any]]
"""A path, and a body."""
_PATIENCE_S = 150.0
_BEGIN_S = 60.0


class Stream(BufferedResponse):
    """A stream of the OpenAI API with log probabilities: what came, and when."""

    def __init__(self, path: str, asked: Mapping[str, Any]) -> None:
        super().__init__()
        self.path, self.asked = path, asked
        self.times: list[float] = []
        self.bytes_before = 0
        """Of the answer, when the kill came."""
        self.broken = "hung"

    def body(self, data: bytes, at: float) -> None:
        """See `BufferedResponse.body`."""
        super().body(data, at)
        self.times.append(at)

    def pause(self) -> float:
        """The longest time between two reads, in seconds."""
        return max((b - a for a, b in itertools.pairwise(self.times)), default=0.0)


@dataclass(frozen=True)
class Told:
    """Tokens of a stream, the likeliest beside each, its text, and its end.

    `end` is the finish reason, or an error's code, or how the connection ended; `cut` the tokens
    before the kill.
    """

    tokens: Sequence[str]
    likeliest: Sequence[Mapping[str, float]]
    text: str
    end: str
    cut: int = 0
    asked: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, stream: Stream) -> Told:
        """Read the events of a stream."""
        lines = re.findall(rb"^data: (\{.*\})\r?$", stream.text, re.MULTILINE)
        events = [json.loads(line) for line in lines]
        choices = [choice for event in events for choice in event.get("choices", ())]
        rows = [_flat(choice["logprobs"]) for choice in choices if choice.get("logprobs")]
        ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        codes = re.findall(rb'"(?:error|code)"[^\n]*?(E\d{4})', stream.text)
        texts = (choice.get("text") or choice.get("delta", {}).get("content") for choice in choices)
        return cls(
            [token for row in rows for token in row["tokens"]],
            [top or {} for row in rows for top in row["top_logprobs"]],
            "".join(text or "" for text in texts),
            codes[-1].decode() if codes else ends[-1] if ends else stream.broken,
            len(re.findall(rb'"logprobs":\s*\{', stream.text[: stream.bytes_before])),
            stream.asked,
        )

    def fault_of(self, other: Told) -> str:
        """Why the first difference of another run is no near tie; "" if it is one, or none is.

        The log probabilities there must be the same but for rounding, and with greedy decoding the
        two best, less their penalties, no further apart.
        """
        pairs = enumerate(zip(self.tokens, other.tokens, strict=False))
        place = next((n for n, (one, two) in pairs if one != two), None)
        if place is None or place >= min(len(self.likeliest), len(other.likeliest)):
            return ""
        one, two = self.likeliest[place], other.likeliest[place]
        moved = max((abs(one[token] - two[token]) for token in one.keys() & two), default=99.0)
        if moved > NEAR:
            return f"at {place}: log probabilities differ by {moved:.3f}"
        asked = self.asked
        if asked.get("temperature") or {"response_format", "structured_outputs"} & asked.keys():
            return ""  # a draw is not reported
        made = Counter(self.tokens[:place])
        frequency, presence = (
            asked.get(name, 0.0) for name in ("frequency_penalty", "presence_penalty")
        )
        scores = sorted(
            value - frequency * made[token] - presence * (token in made)
            for token, value in one.items()
        )
        apart = scores[-1] - scores[-2] if len(scores) > 1 else 99.0
        return f"at {place}: the two best are {apart:.3f} apart" if apart > NEAR else ""


@dataclass
class Streams:
    """Streams of bodies at their paths, undisturbed once, and again for each kill."""

    server: Server
    asked: Sequence[Asked]

    def __post_init__(self) -> None:
        began = time.monotonic()
        streams = asyncio.run(_stream_all(self.server.own, self.asked))
        self.lasted = time.monotonic() - began
        self.undisturbed = [Told.of(stream) for stream in streams]
        assert self._lost(self.undisturbed) == {}

    def kill(self, part: float) -> list[Told]:
        """Kill an engine under all streams, at that part of an undisturbed run.

        All must be whole, and differ from undisturbed ones at near ties only.
        """
        wait_until(lambda: self.server.health() == "READY", PATIENCE_S)
        victim = self.server.victims()[0]

        def strike() -> None:
            os.kill(victim, signal.SIGKILL)

        run = _stream_all(self.server.own, self.asked, strike, part * self.lasted)
        streams = asyncio.run(run)
        found = [Told.of(stream) for stream in streams]
        same = sum(a.tokens == b.tokens for a, b in zip(self.undisturbed, found, strict=True))
        pause = max(stream.pause() for stream in streams)
        print(f"killed at {part:.0%}: {same} of {len(found)} the same, paused {pause:.1f} s")
        assert self._lost(found) == {}, self.server.tail()
        assert any(0 < one.cut < len(one.tokens) for one in found), "the kill came after all"
        pairs = zip(self.undisturbed, found, strict=True)
        faults = [fault for one, other in pairs if (fault := one.fault_of(other))]
        assert faults == []
        return found

    @staticmethod
    def _lost(found: Sequence[Told]) -> Counter[str]:
        """Ends of those that are not whole, and how many."""
        return Counter(one.end for one in found if one.end not in ("stop", "length"))


def completion(number: int, values: Mapping[str, Any], model: str = "model") -> Asked:
    """A completion with log probabilities; each `number` has another prompt."""
    body = {"model": model, "prompt": f"Tale {number} of a king: ", "max_tokens": TOKENS}
    return "/v1/completions", {**body, "logprobs": TOP, **values}


async def _stream_all(
    base: str,
    asked: Sequence[Asked],
    kill: Callable[[], None] | None = None,
    after_s: float = 0.0,
) -> list[Stream]:
    client = Client(3600.0)
    streams = [Stream(path, body) for path, body in asked]
    tasks = [asyncio.create_task(_read(client, base, stream)) for stream in streams]
    if kill is not None:
        async with asyncio.timeout(_BEGIN_S):
            while not all(stream.times for stream in streams):
                await asyncio.sleep(0.01)
        await asyncio.sleep(after_s)
        kill()
        for stream in streams:
            stream.bytes_before = len(stream.text)
    _, late = await asyncio.wait(tasks, timeout=_PATIENCE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    client.close()
    return streams


async def _read(client: Client, base: str, stream: Stream) -> None:
    body = json.dumps({"stream": True, **stream.asked}).encode()
    try:
        await client.send(*encode_request("POST", f"{base}{stream.path}", {}, body), stream)
        stream.broken = "" if stream.status == 200 else f"HTTP {stream.status}"
    except TransportError as error:
        stream.broken = error.kind


def _flat(log_probs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Log probabilities of a chat in the form of those of completions, which stay as they are."""
    if "content" not in log_probs:
        return log_probs
    told = log_probs["content"] or ()
    likeliest = [{_token(top): top["logprob"] for top in one["top_logprobs"]} for one in told]
    return {"tokens": [_token(one) for one in told], "top_logprobs": likeliest}


def _token(told: Mapping[str, Any]) -> str:
    """A token's text, and its bytes if these are no text: others have the same one then."""
    text = str(told["token"])
    return f"{text}{told.get('bytes')}" if "\N{REPLACEMENT CHARACTER}" in text else text
