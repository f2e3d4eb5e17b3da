"""Hostile clients of a server: each input of the table by itself, a fuzz, and clients that idle.

After each class of inputs is known: what was answered, which processes died, how long others
waited, and what CPU it took.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from _attack_inputs import PORTS, Hostile, Inputs, request
from _attack_report import counts
from _control_stream import Control, until_answered
from _servers import Server
from faults.answers import GOOD
from faults.processes import by_role
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cog_triton.system.process_state import stat_fields

ANSWER_S, FUZZ_ANSWER_S = 10.0, 1.5
READY_S = 60.0
MAX_ANSWER = 1 << 20
COLUMNS = ("hostile inputs", "engine", "inputs", "answers", "died", "longest silence s",
           "most CPU s", "control answers", "broken rules")  # fmt: skip
_EXAMPLES = 30
MAY_WAIT = 2.5
"""Seconds that an input may have others wait beyond what they do undisturbed; the aim is 0.5."""
DISPOSABLE = ("template child", "large-bodies child")
"""Processes that do one request's work within limits: their end is that of the request alone."""
_CODED = re.compile(rb"E[12]\d{3} ")
_TO_HEAD = re.compile(rb"(?is)[^\n]*\r\n(?:[^\n]+\r\n)*?content-length: [1-9](?:[^\n]+\r\n)+\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_NEEDS_CODE = re.compile("4(?!04|05)|5")


@dataclass(slots=True)
class Findings:
    """What a class of inputs brought; `problems` has the first examples of each kind.

    `gap` is the longest silence of the control streams in seconds, `cpu` what the worst input cost.
    """

    inputs: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[str]] = field(default_factory=dict)
    controls: Counter[str] = field(default_factory=Counter)
    died: Counter[str] = field(default_factory=Counter)
    gap: float = 0.0
    cpu: float = 0.0

    def take(self, answer: bytes, of: str, hostile: Hostile | None = None) -> None:
        """Count the answer to one hostile input, called `of`."""
        self.inputs += 1
        statuses = [match.decode() for match in _STATUS.findall(answer)] or ["closed"]
        self.answers[statuses[0]] += 1
        to_head = _TO_HEAD.fullmatch(answer) is not None
        if _NEEDS_CODE.match(statuses[0]) and not (to_head or _CODED.search(answer)):
            self.problem(f"{statuses[0]} without a code", of, answer)
        if hostile is None:
            return
        if not statuses[0].startswith(hostile.status) or len(statuses) < hostile.answers:
            wanted = f"{hostile.answers} of {hostile.status}.."
            self.problem(f"{' '.join(statuses)}, not {wanted}", of, answer)
        # Cog answers 200 where a prediction failed; others know better.
        if statuses[0] == "200" and hostile.port != "cog" and b'"error":"' in answer:
            self.problem("an error as 200", of, answer)
        if len(answer) > hostile.most:
            self.problem(f"an answer of {len(answer)} bytes", of, answer)

    def problem(self, what: str, of: str, example: bytes | str = "") -> None:
        """Note what must not be, and the first inputs that brought it."""
        said = example.decode("utf-8", "replace") if isinstance(example, bytes) else example
        examples = self.problems.setdefault(what, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{of}: {said[:200]}" if said else of)

    def failures(self, kind: str) -> list[str]:
        """A line for each example of what must not have happened."""
        found = self.problems.items()
        return [f"{kind}: {what}: {one}" for what, examples in found for one in examples]

    def row(self, kind: str, engine: str) -> tuple[object, ...]:
        """The row of its class in the table."""
        right = self.controls["complete"] + self.controls["other text"]
        return (
            *(kind, engine, self.inputs, counts(self.answers), sum(self.died.values())),
            *(round(self.gap, 2), round(self.cpu, 1)),
            f"{right} of {sum(self.controls.values())} right",
            "; ".join(sorted(self.problems)) or "none",
        )


def processes(root: int) -> dict[tuple[int, int], str]:
    """(PID, start time in ticks) -> role of each process of the server."""
    found = {}
    for role, pids in by_role(root).items():
        for pid in pids:
            if stat := stat_fields(Path(f"/proc/{pid}/stat")):
                found[pid, int(stat[19])] = role
    return found


async def send(port: int, data: bytes, wait: float = ANSWER_S) -> bytes:
    """Send bytes on a connection of their own; what comes back within `wait` seconds."""
    answer = b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return answer
    try:
        for start in range(0, len(data), 1 << 16):
            writer.write(data[start : start + (1 << 16)])
            await asyncio.wait_for(writer.drain(), wait)
        deadline = time.monotonic() + wait
        while len(answer) < MAX_ANSWER:
            more = await asyncio.wait_for(reader.read(1 << 16), deadline - time.monotonic())
            if not more:
                break
            answer += more
    except (TimeoutError, OSError):
        pass
    finally:
        writer.close()
    return answer


class ServerEnded(RuntimeError):
    """A server that an attack has ended, or that was not READY again in time."""


class Attack:
    """An attack on one server; `found` has the findings by class of inputs.

    `quiet` is the longest silence of its undisturbed control streams in seconds.
    """

    def __init__(
        self, target: Server, control: Control, found: dict[str, Findings], quiet: float
    ) -> None:
        self.target, self.control, self._found, self.quiet = target, control, found, quiet
        self.running = processes(target.pid)
        """Processes after the last input, so that a death that shows late counts, too."""
        urls = (target.url, target.openai, target.triton, target.metrics)
        self.ports = {
            name: int(urlsplit(url).port or 0) for name, url in zip(PORTS, urls, strict=True)
        }

    async def table(self, inputs: Iterator[Hostile]) -> None:
        """Send every input of the table, one after the other; raises ServerEnded."""
        for one in inputs:
            name = f"{one.name} to {one.port}"
            async with self._watched(one.kind, name) as findings:
                began = time.monotonic()
                wait = max(ANSWER_S, one.seconds)
                findings.take(await send(self.ports[one.port], one.data, wait), name, one)
                took = time.monotonic() - began
                if took > one.seconds + self.quiet:
                    findings.problem("a slow answer", name, f"{took:.1f} s")

    async def crowds(self) -> None:
        """Clients that idle, send half, or read nothing; and what 8001 lets in."""
        crowds: dict[str, Callable[[Findings], Awaitable[None]]] = {
            "idle connections": lambda findings: self._opened(findings, b"", 1000),
            "half-sent requests": lambda findings: self._opened(findings, _HALF, 300),
            "clients that do not read": self._deaf,
            "gRPC control": self._grpc,
        }
        for kind, crowd in crowds.items():
            async with self._watched(kind, kind) as findings:
                await crowd(findings)

    async def fuzz(self, count: int, seed: int) -> None:
        """`count` mutated requests over all ports, 16 at a time."""
        inputs, left = Inputs(seed), iter(range(count))

        async def some(findings: Findings) -> None:
            for _ in left:
                name, data = inputs.next()
                answer = await send(self.ports[name], data, FUZZ_ANSWER_S)
                findings.take(answer, f"{name}: {data[:200]!r}")

        kind = "mutated requests"
        async with self._watched(kind, kind) as findings:
            await asyncio.gather(*(some(findings) for _ in range(16)))

    @asynccontextmanager
    async def _watched(self, kind: str, of: str) -> AsyncIterator[Findings]:
        """Note what server and control streams did within the block; raises ServerEnded after it.

        What a client has begun may outlast its answer, and a death shows a moment later.
        """
        findings = self._found.setdefault(kind, Findings())
        self.control.take()
        used = sum(self.target.cpu_seconds().values())
        yield findings
        ended: TimeoutError | None = None
        try:
            await until_answered(self.target, READY_S)
        except TimeoutError as error:
            ended = error
            findings.problem("the server ended", of, str(error))
        findings.cpu = max(findings.cpu, sum(self.target.cpu_seconds().values()) - used)
        before, self.running = self.running, processes(self.target.pid)
        gone = [role for key, role in before.items() if key not in self.running]
        findings.died.update(gone)
        if lost := sorted(role for role in gone if role not in DISPOSABLE):
            findings.problem("processes died", of, ", ".join(lost))
        heard = self.control.take()
        findings.controls.update(heard.outcomes)
        findings.gap = max(findings.gap, heard.longest)
        for outcome, example in heard.examples.items():
            if outcome not in GOOD:
                findings.problem(f"a control stream: {outcome}", of, example)
        if heard.longest > self.quiet + MAY_WAIT:
            findings.problem("others waited", of, f"{heard.longest:.1f} s")
        if ended:
            raise ServerEnded(of) from ended

    async def _opened(self, findings: Findings, data: bytes, count: int) -> None:
        """`count` connections over all ports, with `data` on each; newcomers must be served."""
        opened = []
        for number in range(count):
            port = list(self.ports.values())[number % len(self.ports)]
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                opened.append(writer)
        findings.inputs += len(opened)
        newcomer = await send(self.ports["cog"], request("GET", "/health-check"))
        if b'"READY"' not in newcomer:
            findings.problem("a newcomer was refused", f"{len(opened)} connections", newcomer)
        for writer in opened:
            writer.close()

    async def _deaf(self, findings: Findings, count: int = 20) -> None:
        body = b'{"input":{"prompt":"rivers","max_tokens":4000}}'
        data = request("POST", "/predictions", body, "Accept: text/event-stream")
        opened = []
        for _ in range(count):
            with suppress(OSError):
                where = ("127.0.0.1", self.ports["cog"])
                _, writer = await asyncio.open_connection(*where, limit=1024)
                writer.write(data)
                opened.append(writer)
        await asyncio.sleep(3)
        findings.inputs += len(opened)
        for writer in opened:
            writer.transport.abort()

    async def _grpc(self, findings: Findings) -> None:
        """Control of Triton by gRPC, without the header that it asks for."""
        setting = service_pb2.LogSettingsRequest()
        setting.settings["log_verbose_level"].uint32_param = 1
        region = service_pb2.SystemSharedMemoryRegisterRequest(name="a", key="/a", byte_size=1)
        async with grpc.aio.insecure_channel(self.target.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            calls: tuple[tuple[str, Callable[..., Awaitable[object]], object], ...] = (
                ("log settings", stub.LogSettings, setting),
                ("shared memory", stub.SystemSharedMemoryRegister, region),
                ("trace settings", stub.TraceSetting, service_pb2.TraceSettingRequest()),
                ("unload", stub.RepositoryModelUnload,
                 service_pb2.RepositoryModelUnloadRequest(model_name="ensemble")),
            )  # fmt: skip
            for name, call, body in calls:
                findings.inputs += 1
                try:
                    await call(body, timeout=ANSWER_S)
                    code, said = "OK", ""
                except grpc.RpcError as error:
                    code, said = str(error.code().name), str(error.details())  # type: ignore[attr-defined]
                findings.answers[code] += 1
                # Not found by its key is too late: it was looked for.
                if code == "OK" or "Unable to open shared memory" in said:
                    findings.problem(f"{name} by gRPC without a header", code, said)


_HALF = b"POST /predictions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-le"
