"""SIGSTOP of each process of a server in turn, with requests on the way: what becomes of them.

Each role has a server of its own. After SIGSTOP every request must end in time, right or with a
code; and a newcomer must be served, or the server end by itself with a code in its log.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from _resource_usage import part_of
from _servers import Server

from cog_triton.system import reaper

DEADLINE_S = 90.0
ENDING = ("door", "cog", "worker")
"""Parts whose loss is that of the server, for whoever started it to restart."""
_STREAMS = 3
_CODE = re.compile(r"E[12]\d{3} ")
_INPUT = {"prompt": "rivers run to the seas", "max_tokens": 200, "temperature": 0}
_CHAT = {
    "messages": [{"role": "user", "content": "rivers"}],
    "max_tokens": 100,
    "temperature": 0,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stopped role did: to the requests, and when a newcomer was served, or the end came."""

    role: str
    requests: Counter[str]
    seconds: float
    how: str

    @property
    def failed(self) -> bool:
        """Whether something hung, was lost without a code, or came back wrong."""
        bad = [kind for kind in self.requests if kind.startswith("wrong")]
        # Whoever loses the door has no one left to tell them but the broken connection.
        if self.role == "door":
            bad = [kind for kind in bad if not kind.startswith("wrong: broken off")]
        return bool(bad) or self.how.startswith("wrong")


def roles(root: int) -> dict[str, int]:
    """PID of one process of each role."""
    found: dict[str, int] = {}
    for pid in reaper.descendants(root):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")
            if any(word.endswith("/reaper.py") for word in words):
                continue
            role = part_of(words)
            if role != "others":
                found[role] = pid
    return found


async def stop_each(
    start: Callable[[], AbstractContextManager[Server]], wanted: str
) -> list[Outcome]:
    """SIGSTOP of every role whose name contains `wanted`, each on a new server."""
    with start() as target:
        await _warm_up(target)
        names = [name for name in sorted(roles(target.pid)) if wanted in name]
    outcomes = []
    for name in names:
        with start() as target:
            await _warm_up(target)
            outcomes.append(await stop(target, name))
            print(shown(outcomes[-1]), flush=True)
    return outcomes


def shown(outcome: Outcome) -> str:
    """One line."""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.requests.items()))
    verdict = "FAILED " if outcome.failed else ""
    return f"{verdict}SIGSTOP of {outcome.role}: {counts}; {outcome.how}, {outcome.seconds:.1f} s"


async def stop(target: Server, role: str) -> Outcome:
    """Stop one process while requests run, and one that comes after it."""
    pid = roles(target.pid)[role]
    expected = await _predict(target)
    running = [asyncio.ensure_future(_predict(target)) for _ in range(_STREAMS)]
    running += [asyncio.ensure_future(_ask(target, kind)) for kind in ("chat", "large")]
    await asyncio.sleep(0.3)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    running.append(asyncio.ensure_future(_predict(target)))
    running += [asyncio.ensure_future(_ask(target, kind)) for kind in ("chat", "large")]
    how = await _settled(target, role, expected, began)
    seconds = time.monotonic() - began
    left = max(1.0, began + DEADLINE_S - time.monotonic())
    _, hanging = await asyncio.wait(running, timeout=left)
    for task in hanging:
        task.cancel()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    outcomes = Counter(
        "wrong: hangs" if task in hanging else _kind(task.result(), expected) for task in running
    )
    return Outcome(role, outcomes, seconds, how)


def _kind(answer: str, expected: str) -> str:
    if answer in (expected, "as it should be"):
        return "right"
    code = _CODE.search(answer)
    return f"{code[0].strip()}" if code else f"wrong: {answer[:120]}"


async def _settled(target: Server, role: str, expected: str, began: float) -> str:
    """Wait until a newcomer of every kind is served, or the server has ended."""
    while time.monotonic() < began + DEADLINE_S:
        if not _runs(target.pid):
            log = target.log.read_text("utf-8", "replace")
            if role not in ENDING:
                return "wrong: the server ended"
            return "ended with E2105" if "E2105" in log else "wrong: ended without a code"
        answers = await asyncio.gather(
            _predict(target, 10), _ask(target, "chat", 10), _ask(target, "large", 10)
        )
        if [_kind(answer, expected) for answer in answers] == ["right"] * 3:
            return "served again"
        await asyncio.sleep(0.2)
    return "wrong: neither served nor ended"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def _warm_up(target: Server) -> None:
    """Work of every kind, which starts every child."""
    for _ in range(2):
        await asyncio.gather(_predict(target), _ask(target, "chat"), _ask(target, "large"))


async def _predict(target: Server, seconds: float = DEADLINE_S) -> str:
    """Text of a streamed prediction, or its error."""
    headers = {"accept": "text/event-stream"}
    last: dict[str, object] = {}
    try:
        async with (
            httpx.AsyncClient(timeout=seconds) as http,
            http.stream(
                "POST", f"{target.url}/predictions", json={"input": _INPUT}, headers=headers
            ) as answer,
        ):
            if answer.status_code != 200:
                return (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    last = json.loads(line[6:])
    except httpx.TimeoutException:
        return "hangs"
    except httpx.TransportError as error:
        return f"broken off: {type(error).__name__}"
    if last.get("status") == "succeeded":
        output = last.get("output")
        return "".join(output) if isinstance(output, list) else ""
    return f"{last.get('error') or last}"


async def _ask(target: Server, kind: str, seconds: float = DEADLINE_S) -> str:
    """A chat, or a prediction whose body is large."""
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": (f"{target.openai}/v1/chat/completions", _CHAT),
        "large": (f"{target.url}/predictions", {"input": _INPUT, "unused": "x" * (1 << 17)}),
    }
    url, body = asked[kind]
    try:
        async with httpx.AsyncClient(timeout=seconds) as http:
            if kind == "chat":
                models = (await http.get(f"{target.openai}/v1/models")).json()
                body = {**body, "model": models["data"][0]["id"]}
            answer = await http.post(url, json=body)
    except httpx.TimeoutException:
        return "hangs"
    except httpx.TransportError as error:
        return f"broken off: {type(error).__name__}"
    except KeyError:
        return json.dumps(models)
    found = answer.json()
    good = answer.status_code == 200 and ("choices" in found or found.get("status") == "succeeded")
    return "as it should be" if good else answer.text
