"""Attack on servers of its own: hostile clients, and stops, with known text beside.

    make attack ARGS="--inputs 20000"                 # all phases, of the mock; --seed 1
    make attack ARGS="--engine openvino --only drains --match interrupt"

Phases: `inputs` (a table of hostile inputs, crowds of clients, mutated requests), `drains` (SIGTERM
under streams of every API). `make faults` stops and kills every process. It fails when a process
died of an input, a 4xx or 5xx has no code, a control stream has other text or is silent for too
long, memory stays above --growth, a request hangs or is lost without a code, or a stop cuts what it
promised to end.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import clean_environment  # noqa: E402
import grpc  # noqa: E402
from _report import Grid, say, show  # noqa: E402
from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402

from cog_triton.system.process_state import stat_fields  # noqa: E402
from faults import engines, report, scenario  # noqa: E402
from faults.apis import GOOD  # noqa: E402
from faults.control import Control, controlled  # noqa: E402
from faults.hostile_inputs import PORTS, Hostile, Inputs, hostile, request  # noqa: E402
from faults.load import Load  # noqa: E402
from faults.processes import by_role  # noqa: E402
from faults.runner import Runner, warm_up  # noqa: E402
from faults.target import ServerFailure, Start, Target, served  # noqa: E402

PHASES = ("inputs", "drains")
DIRECTORY = ROOT / ".work" / "attack"
_WARM_UP, _SETTLE_S, _UNDISTURBED_S = 24, 30.0, 5.0
_ANSWER_S, _FUZZ_ANSWER_S, _READY_S = 10.0, 1.5, 60.0
_MAX_ANSWER, _EXAMPLES = 1 << 20, 30
MAY_WAIT = 2.5
"""Seconds that an input may have others wait beyond what they do undisturbed; the aim is 0.5."""
DISPOSABLE = ("template child", "large-bodies child")
"""Processes that do one request's work within limits: their end is that of the request alone."""
_CODED = re.compile(rb"E[12]\d{3} ")
_TO_HEAD = re.compile(rb"(?is)[^\n]*\r\n(?:[^\n]+\r\n)*?content-length: [1-9](?:[^\n]+\r\n)+\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_NEEDS_CODE = re.compile("4(?!04|05)|5")
_HALF = b"POST /predictions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-le"
_DEAF = request(
    "POST",
    "/predictions",
    b'{"input":{"prompt":"rivers","max_tokens":4000}}',
    "Accept: text/event-stream",
)


@dataclass(slots=True)
class Findings:
    """What a class of inputs brought; `problems` has the first examples of each kind.

    `gap` is the longest silence of the control streams in seconds.
    """

    inputs: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[str]] = field(default_factory=dict)
    controls: Counter[str] = field(default_factory=Counter)
    gap: float = 0.0

    def take(self, answer: bytes, of: str) -> None:
        """Count the answer to one hostile input, called `of`."""
        self.inputs += 1
        found = _STATUS.search(answer)
        status = found[1].decode() if found else "closed"
        self.answers[status] += 1
        to_head = _TO_HEAD.fullmatch(answer) is not None
        if _NEEDS_CODE.match(status) and not (to_head or _CODED.search(answer)):
            self.problem(f"{status} without a code", of, answer.decode("utf-8", "replace"))

    def problem(self, what: str, of: str, example: str = "") -> None:
        """Note what must not be, and the first inputs that brought it."""
        examples = self.problems.setdefault(what, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{of}: {example[:200]}")


class Attack:
    """An attack on one server; `found` has the findings by class of inputs.

    `quiet` is the longest silence of its undisturbed control streams in seconds.
    """

    def __init__(self, target: Target, control: Control, quiet: float) -> None:
        self.target, self.control, self.quiet = target, control, quiet
        self.found: dict[str, Findings] = {}
        self._running = self._processes()
        """Processes after the last input, so that a death that shows late counts, too."""
        server = target.server
        urls = (server.url, server.openai, server.triton, server.metrics)
        self._ports = dict(zip(PORTS, (urlsplit(url).port or 0 for url in urls), strict=True))

    async def table(self, inputs: Iterator[Hostile]) -> None:
        """Send every input of the table, one after the other."""
        for one in inputs:
            name, began = f"{one.name} to {one.port}", time.monotonic()
            async with self._watched(one.kind, name) as findings:
                wait = max(_ANSWER_S, one.seconds)
                findings.take(await send(self._ports[one.port], one.data, wait), name)
                took = time.monotonic() - began
                if took > one.seconds + self.quiet:
                    findings.problem("a slow answer", name, f"{took:.1f} s")

    async def fuzz(self, count: int, seed: int) -> None:
        """`count` mutated requests over all ports, 16 at a time."""
        inputs, left = Inputs(seed), iter(range(count))

        async def some(findings: Findings) -> None:
            for _ in left:
                name, data = inputs.next()
                answer = await send(self._ports[name], data, _FUZZ_ANSWER_S)
                findings.take(answer, f"{name}: {data[:200]!r}")

        async with self._watched("mutated requests", "any of them") as findings:
            await asyncio.gather(*(some(findings) for _ in range(16)))

    async def crowds(self) -> None:
        """Clients that send half a request, or read nothing; newcomers must be served meanwhile."""
        crowds = {
            "half-sent requests": ([*self._ports.values()] * 75, _HALF),
            "clients that do not read": ([self._ports["cog"]] * 20, _DEAF),
        }
        for kind, (ports, data) in crowds.items():
            async with self._watched(kind, kind) as findings:
                opened = []
                for port in ports:
                    with suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
                        writer.write(data)
                        opened.append(writer)
                findings.inputs += len(opened)
                newcomer = await send(self._ports["cog"], request("GET", "/health-check"))
                if b'"READY"' not in newcomer:
                    findings.problem("a newcomer was refused", kind, str(newcomer))
                await asyncio.sleep(3)
                for writer in opened:
                    writer.transport.abort()

    async def control_by_grpc(self) -> None:
        """Control of Triton by gRPC, without the header that it asks for."""
        region = service_pb2.SystemSharedMemoryRegisterRequest(name="a", key="/a", byte_size=1)
        unload = service_pb2.RepositoryModelUnloadRequest(model_name="ensemble")
        kind = "gRPC control"
        async with (
            self._watched(kind, kind) as findings,
            grpc.aio.insecure_channel(self.target.server.grpc) as channel,
        ):
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for call, body in (
                (stub.SystemSharedMemoryRegister, region),
                (stub.RepositoryModelUnload, unload),
            ):
                findings.inputs += 1
                try:
                    await call(body, timeout=_ANSWER_S)
                    code, said = "OK", ""
                except grpc.RpcError as error:
                    code, said = str(error.code().name), str(error.details())
                findings.answers[code] += 1
                # Not found by its key is too late: it was looked for.
                if code == "OK" or "Unable to open shared memory" in said:
                    findings.problem("taken without a header", type(body).__name__, said)

    @asynccontextmanager
    async def _watched(self, kind: str, of: str) -> AsyncIterator[Findings]:
        """Note what server and control streams did within the block.

        What a client has begun may outlast its answer, and a death shows a moment later. Raises
        ServerFailure if the server has ended.
        """
        findings = self.found.setdefault(kind, Findings())
        self.control.take()
        yield findings
        try:
            await self.target.until_ready(_READY_S)
        except ServerFailure as error:
            findings.problem("the server ended", of, str(error))
            raise
        before, self._running = self._running, self._processes()
        gone = [role for key, role in before.items() if key not in self._running]
        if lost := sorted(role for role in gone if role not in DISPOSABLE):
            findings.problem("processes died", of, ", ".join(lost))
        heard = self.control.take()
        findings.controls.update(heard.outcomes)
        findings.gap = max(findings.gap, heard.longest)
        for outcome, example in heard.examples.items():
            findings.problem(f"a control stream: {outcome}", of, example)
        if heard.longest > self.quiet + MAY_WAIT:
            findings.problem("others waited", of, f"{heard.longest:.1f} s")

    def _processes(self) -> dict[tuple[int, int], str]:
        """(PID, start time in ticks) -> role of each process of the server."""
        pids = ((pid, role) for role, each in by_role(self.target.pid).items() for pid in each)
        stats = ((pid, role, stat_fields(Path(f"/proc/{pid}/stat"))) for pid, role in pids)
        return {(pid, int(stat[19])): role for pid, role, stat in stats if stat}

    def table_of_findings(self) -> Grid:
        """A row for each class."""
        grid = Grid("", ("hostile inputs", "sent", "answers", "longest silence s",
                         "control answers", "broken rules"))  # fmt: skip
        grid.add("none", 0, "", self.quiet, "", "")
        for kind, one in self.found.items():
            answers = ", ".join(f"{count} x {name}" for name, count in sorted(one.answers.items()))
            right = sum(count for outcome, count in one.controls.items() if outcome in GOOD)
            controls = f"{right} of {one.controls.total()} right"
            broken = "; ".join(one.problems) or "none"
            grid.add(kind, one.inputs, answers, one.gap, controls, broken)
        return grid

    @property
    def failures(self) -> list[str]:
        """A line for each example of what must not have happened."""
        return [
            f"{kind}: {what}: {example}"
            for kind, findings in self.found.items()
            for what, examples in findings.problems.items()
            for example in examples
        ]


async def send(port: int, data: bytes, wait: float = _ANSWER_S) -> bytes:
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
        while len(answer) < _MAX_ANSWER:
            more = await asyncio.wait_for(reader.read(1 << 16), deadline - time.monotonic())
            if not more:
                break
            answer += more
    except (TimeoutError, OSError):
        pass
    finally:
        writer.close()
    return answer


async def _inputs(start: Start, options: argparse.Namespace) -> list[str]:
    """Attack one server with all inputs, and print a table; returns the failures."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    every = hostile(random.Random(options.seed))
    table = (one for one in every if options.match in f"{one.kind}: {one.name} to {one.port}")
    with served(start, DIRECTORY / "inputs.log") as target:
        model = target.server.model()
        questions = engines.questions(options.engine, target, options.seed)
        # Work of every kind, which starts every child.
        load = Load.of(target, options.engine, questions, _WARM_UP)
        async with load.running():
            await warm_up(target, load)
        with controlled(target.urls, options.engine, model, questions) as control:
            await asyncio.sleep(_UNDISTURBED_S)
            attack, before = Attack(target, control, control.take().longest), _megabytes(target)
            with suppress(ServerFailure):  # which is among the failures
                await attack.table(table)
                if not options.match:
                    await attack.crowds()
                    await attack.control_by_grpc()
                    await attack.fuzz(options.inputs, options.seed)
            limit, deadline = before * options.growth, time.monotonic() + _SETTLE_S
            while (after := _megabytes(target)) > limit and time.monotonic() < deadline:
                await asyncio.sleep(1)
    show(attack.table_of_findings())
    memory = f"memory: {before:.0f} MB before, {after:.0f} MB after"
    print(memory)
    return [*attack.failures, *([memory] if after > limit else [])]


def _megabytes(target: Target) -> float:
    return sum(target.server.memory_bytes().values()) / 1e6


def _drains(options: argparse.Namespace) -> Sequence[str]:
    """Stop servers in every way; returns the failures."""
    runner = Runner(scenario.read(), DIRECTORY, math.inf)
    stops = scenario.stops(runner.scenarios, options.engine, options.seed)
    runner.run(one for one in stops if options.match in f"{one.scenario} {one.victim}")
    report.conclude(runner)
    return runner.failures


def main() -> int:
    """Attack, print what happened; 1 if anything did that must not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=tuple(engines.PROFILES), default="mock")
    parser.add_argument("--inputs", type=int, default=20_000, help="mutated requests; 20000")
    parser.add_argument("--seed", type=int, default=1, help="of all hostile inputs; 1")
    parser.add_argument("--growth", type=float, default=1.2, help="memory after, by that before")
    parser.add_argument("--only", default=",".join(PHASES), help="phases, by comma; all")
    parser.add_argument("--match", default="", help="inputs and stops with this in their name")
    options = parser.parse_args()
    phases = options.only.split(",")
    if unknown := set(phases) - set(PHASES):
        parser.error(f"--only={','.join(unknown)}: must be of {','.join(PHASES)}")
    clean_environment.clean()
    say(f"attack of {options.engine}: seed {options.seed}, phases {options.only}")
    failures: list[str] = []
    if "inputs" in phases:
        with engines.prepared(options.engine) as start:
            # The table's requests name the mock's model.
            named = {**start.environment, "SERVED_MODEL_NAME": "mock"}
            failures += asyncio.run(_inputs(replace(start, environment=named), options))
    if "drains" in phases:
        failures += _drains(options)
    for line in failures:
        print(f"FAILED: {line}")
    print("attack: FAILED" if failures else "attack: nothing fell")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
