"""Stops under streams of every API: SIGTERM or SIGINT, also with a process that dies meanwhile.

After the first signal the server says that it stops, refuses newcomers, and ends what runs, whole,
within DRAIN_TIMEOUT; also where an engine has to come back for it. After a second it ends at once.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _control_stream import NotServed, ask, in_thread, model_of, question
from _load import QuickAckClient
from _report import as_data
from _resource_usage import role_of
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

from cog_triton.bench.http_client import TransportError, now
from cog_triton.system import reaper

DRAIN_S = 60
_APIS = (PREDICTIONS, CHAT, COMPLETIONS, RESPONSES, TRITON)
_EACH, _TOKENS = 2, {"mock": 600, "openvino": 40}
_RUNNING_S, _TOLD_S, _AT_ONCE_S, _EXIT_S = 1.0, 3.0, 12.0, 30.0
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
    streams: dict[str, Counter[str]] = field(default_factory=dict)
    webhooks: Counter[str] = field(default_factory=Counter)
    newcomers: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    gap: float = 0.0
    problems: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As data."""
        return {**as_data(self), "failed": bool(self.problems)}


def roles(root: int) -> dict[str, int]:
    """PID of one process of each role below the harness's own reaper, whose PID is `root`."""
    found: dict[str, int] = {}
    for pid in reaper.descendants(root):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")
            if words[0] and (role := role_of(words)) != "others":
                found[role] = pid
    return found


async def drain_each(
    start: Callable[[bool], AbstractContextManager[Server]], engine: str, wanted: str
) -> list[Drain]:
    """Stop a new server in each way whose description contains `wanted`."""
    drains = []
    for as_image, sent, killed in PLAN:
        way = "the images' command" if as_image else "cog-triton serve"
        drain = Drain(way, sent, killed)
        if wanted not in f"{way} {sent} {killed}":
            continue
        try:
            async with in_thread(start(as_image)) as target:
                with _receiver() as hooks:
                    await _stop(target, engine, drain, hooks)
        except NotServed as error:
            drain.problems.append(str(error))
        drains.append(drain)
        print(shown(drain), flush=True)
    return drains


def shown(drain: Drain) -> str:
    """One line, and one for each broken promise."""
    streams = "; ".join(
        f"{path}: {', '.join(f'{count} {name}' for name, count in sorted(ends.items()))}"
        for path, ends in drain.streams.items()
    )
    verdict = "FAILED " if drain.problems else ""
    killed = f", {drain.killed} killed" if drain.killed else ""
    told = (
        f"{verdict}{drain.sent} to {drain.way}{killed}: {streams}; ended in {drain.seconds:.1f} s"
    )
    return "\n    ".join([told, *drain.problems])


async def _stop(target: Server, engine: str, drain: Drain, hooks: _Hooks) -> None:
    """Stop a server under streams; what became of it goes to `drain`."""
    model = await model_of(target)
    pids = reaper.descendants(target.pid)
    main = next(pid for pid in sorted(pids) if _parent(pid) == target.pid)
    running: list[asyncio.Task[Answer]] = []
    for api in _APIS:
        kind = kinds.plain(api.path, engine)
        # Those of Cog's own port end first: the others must not depend on a connection to it.
        tokens = _TOKENS[engine] // (4 if api is PREDICTIONS else 1)
        asked = await question(target, engine, model, kind, tokens)
        answers = [Answer(kind, engine, asked, now()) for _ in range(_EACH)]
        running += [asyncio.create_task(ask(target, model, one)) for one in answers]
    body = {"input": {"prompt": "x", "max_tokens": _TOKENS[engine] // 2}, "webhook": hooks.url}
    await _post(target, "/predictions", body, {"Prefer": "respond-async"})
    await asyncio.sleep(_RUNNING_S)
    found = roles(target.pid)
    os.kill(main, getattr(signal, drain.sent.split()[0]))
    began = time.monotonic()
    if drain.sent.endswith("twice"):
        await asyncio.sleep(_RUNNING_S / 2)
        os.kill(main, signal.SIGTERM)
    elif drain.killed:
        await asyncio.sleep(_RUNNING_S / 2)
        os.kill(found[drain.killed], signal.SIGKILL)
    else:
        await _newcomers(target, model, drain)
    limit = _AT_ONCE_S if drain.sent.endswith("twice") else DRAIN_S + _EXIT_S
    while _is_running(main) and time.monotonic() < began + limit:
        await asyncio.sleep(0.05)
    drain.seconds = time.monotonic() - began
    if _is_running(main):
        drain.problems.append(f"still runs after {drain.seconds:.0f} s")
    _, hanging = await asyncio.wait(running, timeout=5)
    for task in hanging:
        task.cancel()
    drain.problems += [f"{len(hanging)} streams hang"] if hanging else []
    for task in running:
        if task not in hanging:
            _account(drain, task.result(), began)
    drain.webhooks = hooks.statuses
    if not drain.sent.endswith("twice") and not hooks.statuses["succeeded"]:
        drain.problems.append(f"no webhook of a prediction's end: {dict(hooks.statuses)}")
    if hooks.late:
        drain.problems.append(f"{hooks.late} webhooks came after the one of the end")
    left = [pid for pid in pids if _is_running(pid)]
    if not _is_running(main) and left:
        drain.problems.append(f"{len(left)} processes are left")


def _account(drain: Drain, answer: Answer, began: float) -> None:
    outcome = answer.outcome
    drain.streams.setdefault(answer.kind.api.path, Counter())[outcome] += 1
    gaps = [after - before for before, after in zip(answer.reads, answer.reads[1:], strict=False)]
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
    await asyncio.sleep(_RUNNING_S / 2)
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
            told = f"a newcomer of {path}: {status}, {', '.join(wrong)}: {text[:120]!r}"
            drain.problems.append(told)
    for url in (f"{target.url}/health-check", f"{target.openai}/health", _ready(target)):
        with suppress(TransportError, OSError):
            answer = await QuickAckClient(_TOLD_S).fetch("GET", url, {})
            if answer.status == 200 and b"UNHEALTHY" not in answer.text:
                drain.problems.append(f"{url.split('/', 3)[3]} says that all is well")


def _ready(target: Server) -> str:
    return f"{target.triton}/v2/health/ready"


async def _post(
    target: Server, path: str, body: dict[str, Any], headers: dict[str, str]
) -> tuple[int, dict[bytes, bytes], bytes]:
    base = {"v1": target.openai, "v2": target.triton}.get(path.split("/")[1], target.url)
    try:
        data = json.dumps(body).encode()
        answer = await QuickAckClient(_EXIT_S).fetch("POST", f"{base}{path}", headers, data)
    except (TransportError, OSError) as error:
        return 0, {}, str(error).encode()
    return answer.status, dict(answer.headers), answer.text


def _parent(pid: int) -> int:
    return int(_stat(pid)[1]) if _stat(pid) else 0


def _is_running(pid: int) -> bool:
    return bool(_stat(pid)) and _stat(pid)[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


@dataclass(slots=True)
class _Hooks:
    """Webhooks of one prediction by its status; `late` came after one that told its end."""

    url: str = ""
    statuses: Counter[str] = field(default_factory=Counter)
    late: int = 0


@contextmanager
def _receiver() -> Iterator[_Hooks]:
    """A server of webhooks on this machine."""
    hooks = _Hooks()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hooks.late += bool({"succeeded", "failed", "canceled"} & hooks.statuses.keys())
            hooks.statuses[str(json.loads(body).get("status"))] += 1
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as receiver:
        hooks.url = f"http://127.0.0.1:{receiver.server_port}/"
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        yield hooks
        receiver.shutdown()
