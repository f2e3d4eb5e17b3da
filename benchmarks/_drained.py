"""Stops under streams of every API: SIGTERM or SIGINT, also with a process that dies meanwhile.

After the first signal the server says that it stops, refuses newcomers, and ends what runs, whole,
within DRAIN_TIMEOUT; also where an engine has to come back for it. After a second it ends at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _attack_report import counts
from _control_stream import NotServed, question
from _load import QuickAckClient
from _servers import Server
from faults import kinds
from faults.answers import (
    CHAT,
    COMPLETIONS,
    CUT,
    ENDED,
    GOOD,
    PREDICTIONS,
    RESPONSES,
    TRITON,
    Answer,
)
from faults.load import ask
from faults.processes import by_role
from webhook_receiver import Receiver

from cog_triton.bench.http_client import TransportError, now
from cog_triton.system import reaper
from cog_triton.system.process_state import process_state, stat_fields

DRAIN_S = 60
_APIS = (PREDICTIONS, CHAT, COMPLETIONS, RESPONSES, TRITON)
_EACH, _TOKENS = 2, {"mock": 600, "openvino": 40}
_RUNNING_S, _TOLD_S, _AT_ONCE_S, _EXIT_S, _PATIENCE_S = 1.0, 3.0, 12.0, 30.0, 300.0
COLUMNS = ("stopped", "engine", "signal", "killed meanwhile", "streams", "newcomers",
           "webhooks", "ended after s", "longest silence s", "broken promises")  # fmt: skip
VICTIMS = ("", "engine", "stub tensorrt_llm", "tritonserver")
PLAN: tuple[tuple[bool, str, str], ...] = (
    *((as_image, "SIGTERM", victim) for victim in VICTIMS for as_image in (False, True)),
    (False, "SIGINT", ""),
    (False, "SIGTERM twice", ""),
    (True, "SIGTERM twice", ""),
)  # fmt: skip
"""Whether it runs as images do, the signal, and the role that is killed meanwhile."""


@dataclass(slots=True)
class Drain:
    """What a stop did to the streams of each API; `problems` are promises that it broke."""

    way: str
    sent: str
    killed: str
    streams: Counter[str] = field(default_factory=Counter)
    webhooks: Counter[str] = field(default_factory=Counter)
    newcomers: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    gap: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "FAILED " if self.problems else ""
        killed = f", {self.killed} killed" if self.killed else ""
        line = (
            f"{verdict}{self.sent} to {self.way}{killed}: {counts(self.streams)};"
            f" ended in {self.seconds:.1f} s"
        )
        return "\n    ".join([line, *self.problems])

    def row(self, engine: str) -> tuple[object, ...]:
        """Its row in the table."""
        return (
            *(self.way, engine, self.sent, self.killed or "none", counts(self.streams)),
            *(counts(self.newcomers), counts(self.webhooks), round(self.seconds, 1)),
            *(round(self.gap, 1), len(self.problems) or "none"),
        )


def drain_each(
    start: Callable[[bool], AbstractContextManager[Server]], engine: str, wanted: str
) -> Iterator[Drain]:
    """Stop a new server in each way whose description contains `wanted`."""
    for as_image, sent, killed in PLAN:
        drain = Drain("the images' command" if as_image else "cog-triton serve", sent, killed)
        if wanted not in f"{drain.way} {sent} {killed}":
            continue
        try:
            with start(as_image) as target, Receiver() as hooks:
                asyncio.run(_stop(target, engine, drain, hooks))
        except (NotServed, SystemExit) as error:
            drain.problems.append(str(error))
        yield drain


async def _stop(target: Server, engine: str, drain: Drain, hooks: Receiver) -> None:
    """Stop a server under streams; what became of it goes to `drain`."""
    model, client = target.model(), QuickAckClient(_PATIENCE_S)
    pids = reaper.descendants(target.pid)
    main = next(pid for pid in sorted(pids) if _parent(pid) == str(target.pid))
    answers = []
    for api in _APIS:
        kind = kinds.plain(api.path, engine)
        # Those of Cog's own port end first: the others must not depend on a connection to it.
        tokens = _TOKENS[engine] // (4 if api is PREDICTIONS else 1)
        asked = await question(target, engine, model, kind, tokens)
        answers += [Answer(kind, engine, asked, now()) for _ in range(_EACH)]
    running = [asyncio.create_task(ask(client, target.urls, model, one)) for one in answers]
    body = {"input": {"prompt": "x", "max_tokens": _TOKENS[engine] // 2}, "webhook": hooks.url}
    await _post(target, "/predictions", body, {"Prefer": "respond-async"})
    await asyncio.sleep(_RUNNING_S)
    found = by_role(target.pid)
    number, twice = signal.Signals[drain.sent.split()[0]], drain.sent.endswith("twice")
    os.kill(main, number)
    began = time.monotonic()
    await asyncio.sleep(_RUNNING_S / 2)
    if twice:
        os.kill(main, signal.SIGTERM)
    elif drain.killed:
        os.kill(found[drain.killed][-1], signal.SIGKILL)
    else:
        await _newcomers(target, model, drain)
    limit = _AT_ONCE_S if twice else DRAIN_S + _EXIT_S
    while _is_running(main) and time.monotonic() < began + limit:
        await asyncio.sleep(0.05)
    drain.seconds = time.monotonic() - began
    if _is_running(main):
        drain.problems.append(f"still runs after {drain.seconds:.0f} s")
    _, hanging = await asyncio.wait(running, timeout=5)
    for task in hanging:
        task.cancel()
    drain.problems += [f"{len(hanging)} streams hang"] if hanging else []
    for task, answer in zip(running, answers, strict=True):
        if task not in hanging:
            task.result()
            _account(drain, answer, began)
    states = [str(event.get("status")) for event in hooks.events]
    drain.webhooks.update(states)
    if not twice and "succeeded" not in states:
        drain.problems.append(f"no webhook of a prediction's end: {dict(drain.webhooks)}")
    if {"succeeded", "failed", "canceled"} & {*states[:-1]}:
        drain.problems.append("a webhook came after the one of the end")
    left = sum(map(_is_running, pids))
    if left and not _is_running(main):
        drain.problems.append(f"{left} processes are left")


def _account(drain: Drain, answer: Answer, began: float) -> None:
    outcome = answer.outcome
    drain.streams[f"{answer.kind.api.path} {outcome}"] += 1
    gaps = (after - before for before, after in itertools.pairwise(answer.reads))
    drain.gap = max([drain.gap, *gaps])
    at_once = drain.sent.endswith("twice") and outcome in (CUT, "E2105", ENDED)
    # Triton's own clients are promised no more than a code when Triton dies.
    lost_with_triton = drain.killed and answer.kind.api is TRITON and outcome in GOOD
    if outcome in GOOD[:2] or at_once or lost_with_triton:
        return
    after = (answer.ended or began) - began
    drain.problems.append(f"{after:.1f} s after the signal: {answer}")


async def _newcomers(target: Server, model: str, drain: Drain) -> None:
    """New requests of each API, and probes: refused with a code, when to come again, and close."""
    small = {"max_tokens": 2}
    for path, body in (
        (PREDICTIONS.path, {"input": {"prompt": "x", **small}}),
        (CHAT.path, {"model": model, "messages": [{"role": "user", "content": "x"}], **small}),
        ("/v2/models/ensemble/generate", {"text_input": "x", **small}),
    ):
        status, headers, text = await _post(target, path, body, {})
        drain.newcomers[f"{path} {status}"] += 1
        wrong = [
            *(["not 503"] if status != 503 else []),
            *(["no code"] if b"E2" not in text else []),
            *(["no Retry-After"] if b"retry-after" not in headers else []),
            *(["not closed"] if headers.get(b"connection", b"").lower() != b"close" else []),
        ]
        if wrong:
            line = f"a newcomer of {path}: {status}, {', '.join(wrong)}: {text[:120]!r}"
            drain.problems.append(line)
    for url in (
        f"{target.url}/health-check",
        f"{target.openai}/health",
        f"{target.triton}/v2/health/ready",
    ):
        with suppress(TransportError, OSError):
            answer = await QuickAckClient(_TOLD_S).fetch("GET", url, {})
            if answer.status == 200 and b"UNHEALTHY" not in answer.text:
                drain.problems.append(f"{url.split('/', 3)[3]} says that all is well")


async def _post(
    target: Server, path: str, body: dict[str, Any], headers: dict[str, str]
) -> tuple[int, dict[bytes, bytes], bytes]:
    url = f"{target.urls[path.split('/')[1]]}{path}"
    try:
        data = json.dumps(body).encode()
        answer = await QuickAckClient(_EXIT_S).fetch("POST", url, headers, data)
    except (TransportError, OSError) as error:
        return 0, {}, str(error).encode()
    return answer.status, dict(answer.headers), answer.text


def _parent(pid: int) -> str:
    return stat_fields(Path(f"/proc/{pid}/stat"))[1]


def _is_running(pid: int) -> bool:
    return process_state(pid) not in ("", "Z", "X")
