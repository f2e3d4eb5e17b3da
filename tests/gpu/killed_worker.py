"""Streams over a server one of whose processes is killed: lost, wrong, hung, and what came back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench
import prompts
from endpoints import Endpoint
from load import Reads, ask, read
from prompts import Prompt
from results import Phase
from servers import NotStarted, Ours, Server

from cog_triton.bench.http_client import TransportError

STREAMS, TOKENS = 64, 512
COMPUTING = ("vLLM worker", "vLLM EngineCore", "our host of AsyncLLM")
"""Roles whose death takes an engine with it, the innermost first."""
_BEGIN_S = 60
_LONG_S = 3600.0
_PATIENCE_S = 240.0  # a start of eight ranks, and all tokens again
_DIFFERENT = 16
_ALONE_S = 60.0
_LINES = 60


@dataclass
class Stream:
    """One stream: what came, when, and how it ended: "whole", an error's code, "cut" or "hung"."""

    text: str = ""
    ended: str = ""
    times: list[float] = field(default_factory=list)
    pause: float = 0.0
    """The longest time between two reads with text, in seconds."""


async def _read(endpoint: Endpoint, prompt: Prompt, max_tokens: int, stream: Stream) -> None:
    answer = Reads(endpoint.mark)
    stream.times = answer.times
    try:
        with suppress(TransportError):  # judged by what came
            await read(endpoint, prompt, max_tokens, answer, _LONG_S)
    except asyncio.CancelledError:
        stream.ended = "hung"
        raise
    finally:
        stream.pause = answer.pause
        stream.text = str(endpoint.output(answer.text))
        if not stream.ended:
            code = re.search(rb'"(?:error|code)"[^\n]*?(E\d{4})', answer.text)
            whole = endpoint.tokens(answer.text)[1] == max_tokens
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
                patience = max(0.1, until - time.monotonic())
                record, _ = await ask(endpoint, prompt, 4, patience)
                found["first_token_s"] = round(record.sent + (record.ttft or 0.0) - began, 2)
                return
            except (TransportError, RuntimeError):
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


class UnderStreams:
    """64 streams by /v1 of one server: twice undisturbed, and again for each kill.

    A stream only ever grows, so the text before a kill is the beginning of its text afterwards by
    construction; whether that goes on rightly is told by the comparison with the first run. Two
    undisturbed runs may differ, too: batches do, and with them sums in bf16. After a death the
    tokens so far are read as a prompt, by other kernels: one text in `_DIFFERENT` may differ, too.
    """

    def __init__(self, server: Ours, model: Path, until: float) -> None:
        """Stream twice; nothing lasts much beyond `until`, a time of `time.monotonic`."""
        self._server, self._until = server, until
        self._endpoint = Endpoint("/v1", server.openai)
        # Each says its words twice: the double of vLLM goes on with what repeats itself.
        halves = prompts.make(model, STREAMS, bench.INPUT_TOKENS // 2, seed=22)
        self._prompts = [Prompt(half.text * 2, half.ids * 2) for half in halves]
        self._expected, again = (asyncio.run(self._run()) for _ in range(2))
        self.undisturbed = judge(again, self._expected)
        """The second run, compared with the first."""
        self._alone = self._ask_alone()

    def kill(self, role: str, pid: int) -> dict[str, Any]:
        """`kill -9` of a process, once each stream has text.

        Returns its role, what became of the streams, how many went on after it, and the way back
        as `until_back` tells it.
        """
        print(f"  kill -9 {pid} ({role})", flush=True)
        row = {"killed": role, **asyncio.run(self._kill(pid))}
        print(f"  {row}", flush=True)
        return row

    def check(self, phase: Phase, name: str, row: dict[str, Any]) -> bool:
        """Check what `kill` has returned; whether the server answers again, and as before."""
        judged, said = row["streams"], f"{name}: " if name else ""
        phase.check(f"{said}it was under streams", judged["went_on"] > 0, judged)
        phase.check(f"{said}no stream hangs", not judged["hung"], judged)
        phase.check(f"{said}no stream is lost", not judged["lost"], judged)
        allowed = self.undisturbed["wrong"] + len(self._prompts) // _DIFFERENT
        few = judged["wrong"] <= allowed
        phase.check(f"{said}texts are those of before, but for rounding", few,
                    (judged, self.undisturbed))  # fmt: skip
        back = row["first_token_s"] is not None
        if not phase.check(f"{said}it answers again", back, self._server.tail()):
            return False
        after = self._ask_alone()
        return phase.check(f"{said}as before", after == self._alone, (self._alone, after))

    async def _run(self, then: Callable[[], Awaitable[None]] | None = None) -> list[Stream]:
        left = self._until - time.monotonic() - 20
        patience_s = min(_PATIENCE_S, max(30.0, left))
        return await run(self._endpoint, self._prompts, TOKENS, patience_s, then)

    async def _kill(self, pid: int) -> dict[str, Any]:
        began = 0.0
        back: list[asyncio.Task[dict[str, float | None]]] = []

        async def strike() -> None:
            nonlocal began
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            coming = until_back(self._server, self._endpoint, self._prompts[0], began, self._until)
            back.append(asyncio.create_task(coming))

        read = {path: path.stat().st_size for path in self._server.logs()}
        told: list[str] = []

        async def follow() -> None:
            while True:
                told.extend(_new_lines(self._server, read, began))
                await asyncio.sleep(0.02)

        following = asyncio.create_task(follow())
        streams = await self._run(strike)
        following.cancel()
        judged = judge(streams, self._expected)
        judged["same_undisturbed"] = self.undisturbed["same"]
        judged["went_on"] = sum(stream.times[-1:] > [began] for stream in streams)
        firsts = [next((t - began for t in s.times if t > began + 0.1), 0.0) for s in streams]
        spread = [round(at, 2) for at in sorted(firsts)[:: max(1, len(firsts) // 8)]]
        return {"streams": judged, **await back[0], "again_s": spread, "log": told[:_LINES]}

    def _ask_alone(self) -> Any:
        """Greedy text of one prompt alone; TransportError if it takes too long."""
        _, answer = asyncio.run(ask(self._endpoint, self._prompts[0], 64, _ALONE_S))
        return self._endpoint.output(answer)


def _new_lines(server: Server, read: dict[Path, int], began: float) -> list[str]:
    """Lines that its logs have got since the kill, each after the seconds since then."""
    found = []
    for path in server.logs() if began else ():
        with path.open("rb") as file:
            file.seek(read.get(path, 0))
            lines = file.read().rpartition(b"\n")[0].decode("utf-8", "replace")
        read[path] = read.get(path, 0) + len(lines.encode()) + bool(lines)
        at = f"{time.monotonic() - began:.2f} {path.stem}: "
        found += [at + line[:160] for line in lines.splitlines()]
    return found


def computing(server: Server) -> dict[int, str]:
    """Role of each process of the server's engines, by process id."""
    return {pid: role for pid, role in server.processes().items() if role in COMPUTING}


def victim(server: Server, among: Collection[int] = ()) -> tuple[str, int]:
    """Role and pid of a process whose death takes the engine that serves: the eldest of them.

    If some are told, it is one `among` these.
    """
    found = {pid: role for pid, role in computing(server).items() if not among or pid in among}
    for role in COMPUTING:
        if pids := [pid for pid, of in found.items() if of == role]:
            return role, min(pids, key=_age_key)
    raise RuntimeError(f"no engine among {sorted(set(server.processes().values()))}")


def _age_key(pid: int) -> int:
    """Start of a process, in ticks since the machine's."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
