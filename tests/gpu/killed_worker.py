"""Streams over a server one of whose processes is killed: lost, wrong, hung, and what came back."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from endpoints import Endpoint
from load import WorkerResult, ask
from prompts import Prompt
from servers import NotStarted, Server

_BEGIN_S = 60


@dataclass
class Stream:
    """One stream: what came, when, and how it ended: "whole", an error's code, "cut" or "hung"."""

    text: str = ""
    ended: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def pause(self) -> float:
        """The longest time between two reads with text, in seconds."""
        pairs = itertools.pairwise(self.times)
        return max((later - earlier for earlier, later in pairs), default=0.0)


async def _read(endpoint: Endpoint, prompt: Prompt, max_tokens: int, stream: Stream) -> None:
    answer = bytearray()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port, limit=1 << 20)
        try:
            writer.write(endpoint.request(prompt, max_tokens))
            while chunk := await reader.read(65536):
                answer += chunk
                if endpoint.mark in chunk:
                    stream.times.append(time.monotonic())
        finally:
            writer.close()
    except OSError as error:
        stream.ended = type(error).__name__
    except asyncio.CancelledError:
        stream.ended = "hung"
        raise
    finally:
        told = bytes(answer)
        stream.text = str(endpoint.output(told))
        if not stream.ended:
            code = re.search(rb'"(?:error|code)"[^\n]*?(E\d{4})', told)
            whole = endpoint.tokens(told)[1] == max_tokens
            stream.ended = "whole" if whole else code[1].decode() if code else "cut"


async def run(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    max_tokens: int,
    patience_s: float,
    when_all_began: Callable[[], Awaitable[None]] | None = None,
) -> list[Stream]:
    """Stream all prompts at once; `when_all_began` runs once each has text.

    What has not ended `patience_s` seconds later hangs.
    """
    streams = [Stream() for _ in prompts]
    tasks = [
        asyncio.create_task(_read(endpoint, prompt, max_tokens, stream))
        for prompt, stream in zip(prompts, streams, strict=True)
    ]
    if when_all_began:
        deadline = time.monotonic() + _BEGIN_S
        while not all(s.times or s.ended for s in streams) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await when_all_began()
    _, late = await asyncio.wait(tasks, timeout=patience_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return streams


def judge(streams: Sequence[Stream], expected: Sequence[Stream]) -> dict[str, Any]:
    """Counts: `whole` and of these `same` as expected, `hung`, `lost` (all others, by how)."""
    ends = Counter(stream.ended for stream in streams)
    pairs = list(zip(streams, expected, strict=True))
    same = sum(s.ended == "whole" and s.text == e.text for s, e in pairs)
    lost = {how: count for how, count in ends.items() if how not in ("whole", "hung")}
    begins = sum(e.text.startswith(s.text) for s, e in pairs if s.ended != "whole")
    return {
        "streams": len(streams),
        "whole": ends["whole"],
        "same": same,
        "wrong": ends["whole"] - same,
        "hung": ends["hung"],
        "lost": sum(lost.values()),
        "lost_by": lost,
        "of_these_the_text_so_far_is_right": begins,
        "longest_pause_s": round(max((s.pause for s in streams), default=0.0), 2),
    }


async def until_back(
    server: Server, endpoint: Endpoint, prompt: Prompt, began: float, until: float
) -> dict[str, float | None]:
    """Seconds from `began` until it is not ready, ready again, and answers a new request."""
    found: dict[str, float | None] = dict.fromkeys(("not_ready_s", "ready_s", "first_token_s"))

    async def answers() -> None:
        while time.monotonic() < until:
            try:
                request = endpoint.request(prompt, 4)
                share = WorkerResult()
                sent = time.monotonic()
                asked = ask(share, endpoint, request, len(prompt.ids), 4)
                await asyncio.wait_for(asked, max(0.1, until - time.monotonic()))
                found["first_token_s"] = round(sent + share.ttft[0] - began, 2)
                return
            except (OSError, RuntimeError, asyncio.TimeoutError):
                await asyncio.sleep(0.2)

    async def is_ready() -> None:
        while time.monotonic() < until and (
            found["ready_s"] is None or found["first_token_s"] is None
        ):
            try:
                ready = await asyncio.to_thread(server.healthy)
            except NotStarted:
                ready = False
            now = round(time.monotonic() - began, 2)
            if not ready and found["not_ready_s"] is None:
                found["not_ready_s"] = now
            if ready and found["not_ready_s"] is not None and found["ready_s"] is None:
                found["ready_s"] = now
            if found["first_token_s"] is not None and found["not_ready_s"] is None:
                return  # it was ready all the time
            await asyncio.sleep(0.1)

    await asyncio.gather(answers(), is_ready())
    return found
