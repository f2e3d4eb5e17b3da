"""Engines parked off the GPU: alone, and as the spare of a server whose engine is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import killed_worker
import models
import prompts
from arguments import REPOSITORY
from endpoints import Endpoint
from killed_worker import UnderStreams
from load import WorkerResult, ask
from lone_engine import Tokens, cuda_states, gpu_memory, lone_engine, said, variables
from parked_servers import swapped
from prompts import Prompt
from results import Phase
from servers import Ours, running
from snapshots import Snapshot

from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.vllm_version import installed_version
from cog_triton.keeper.engine_parking import EngineParking
from cog_triton.keeper.kept_engine import KeptEngine
from cog_triton.system import reaper
from cog_triton.system.host_memory import host_memory

if TYPE_CHECKING:
    from verify import Driver

BUDGETS = {"park": 560, "park-tp": 560, "park-serve": 560}
LEAST = {"park": 30, "park-tp": 90, "park-serve": 60}
_TP_LAYERS = 8
_ANSWER_S = 60.0
_LOAD_S = 240.0
_PROMPTS, _TOKENS = 4, 32
_SPARE_S = 150.0  # a load of 55 s, also where nothing is compiled
_OF_SPARE = r"spare engine(?: \d+ is parked:| \d+| any more:|:) (.*)"
_AGAIN_S = 75  # another spare is parked, and takes over
_APART = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_NVLS_ENABLE"), "0"),
}
_SUSPENDED = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
_SPARE = {"SPARE_ENGINE": "1"}
_CHECKPOINTED, _ASLEEP = "off the GPU", "asleep"


@dataclass(frozen=True)
class Part:
    """A part of a phase, by its name in --parts and the seconds that it needs, at 8B's size."""

    name: str
    seconds: float
    work: Callable[[Phase, str], bool]
    """Gets its name in results; returns whether it went well."""


class Parking:
    """Phases `park`, `park-serve` (one GPU) and `park-tp` (two GPUs, tensor parallel)."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._driver_double: dict[str, str] = {}
        self._later_s = 0.0  # what the parts after this one need

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {"park": self.park, "park-tp": self.park_tp, "park-serve": self.park_serve}

    def park(self, phase: Phase) -> None:
        """One GPU: a server with a spare of each kind and without one; vLLM's snapshot; an engine.

        Most of them kill the server's engine under streams.
        """
        self._machine(phase)
        model = self._model("park", {}, self._driver.options.layers or 32)
        sleeps = {**_SPARE, "PARK_CHECKPOINT": "0"}
        self._run(phase, (
            Part("spare", 130, self._served(model, _SPARE, _CHECKPOINTED)),
            Part("no-spare", 135, self._served(model, {})),
            Part("asleep", 125, self._served(model, sleeps, _ASLEEP)),
            Part("snapshot", 25, self._snapshot),
            Part("alone", 75, self._alone(model, {})),
        ))  # fmt: skip

    def park_tp(self, phase: Phase) -> None:
        """Two GPUs: spares of ranks by what NCCL must give up for a checkpoint, then engines."""
        self._machine(phase)
        layers = self._driver.options.layers or _TP_LAYERS
        parts, alone = [], []
        for name, arguments, environment, way in self._variants():
            both = {"tensor_parallel_size": 2, **arguments}
            model = self._model(f"park-tp-{name}", both, layers)
            served = self._served(model, {**_SPARE, **environment}, way)
            parts.append(Part(name, 130, served))
            alone.append(Part(f"alone-{name}", 75, self._alone(model, environment)))
        self._run(phase, (*parts, *alone))

    def park_serve(self, phase: Phase) -> None:
        """One GPU: two models in turn."""
        self._machine(phase)
        layers = self._driver.options.layers or 32
        one, two = (self._model(f"park-serve-{name}", {}, layers) for name in ("one", "two"))
        swapping = {"SERVED_MODEL_NAME": "", "SWAP_RESIDENCE": "0"}
        self._run(phase, (Part("swap", 100, partial(self._swapped, one, two, swapping)),))

    def _swapped(
        self, model: Path, second: Path, more: Mapping[str, str], phase: Phase, name: str
    ) -> bool:
        server = self._driver.ours(f"{phase.name}-{name}", model, **self._environment(more))
        return swapped(phase, server, second)

    def _variants(self) -> list[tuple[str, dict[str, Any], dict[str, str], str]]:
        """Ways to set up ranks, by name, and how each can be parked; the surest first."""
        own: dict[str, Any] = {"disable_custom_all_reduce": True}
        python = None if self._driver.rehearsal else str(self._driver.python)
        found = [("sockets", own, _APART, _CHECKPOINTED), ("as-usual", {}, {}, _ASLEEP)]
        if "enable_nccl_comm_suspend" in types_of(installed_version(python)).engine_args:
            suspended = {**own, "enable_nccl_comm_suspend": True}
            found.append(("suspended", suspended, _SUSPENDED, _CHECKPOINTED))
        return found

    def _run(self, phase: Phase, parts: Sequence[Part]) -> None:
        """Run those parts that were chosen, in turn; none keeps the next one from running."""
        chosen = self._driver.options.parts
        parts = [part for part in parts if not chosen or part.name in chosen]
        for number, part in enumerate(parts):
            self._later_s = sum(later.seconds for later in parts[number + 1 :])
            name, left = part.name.replace("-", " "), self._left()
            if left < part.seconds and not self._driver.rehearsal:
                print(f"  {name}: not run, {left:.0f} s are left", flush=True)
                phase.put(f"{name}: not run", f"{left:.0f} s left")
                continue
            print(f"  -- {name}, about {part.seconds:.0f} s", flush=True)
            began = time.monotonic()
            try:
                part.work(phase, name)
            except Exception as error:  # noqa: BLE001 - the other parts are to be seen, too
                phase.check(f"{name}: went through", False, f"{type(error).__name__}: {error}")
            phase.put(f"{name}: seconds", round(time.monotonic() - began, 1))

    def _left(self) -> float:
        return self._driver.until - time.monotonic()

    def _machine(self, phase: Phase) -> None:
        if self._driver.rehearsal and not self._driver_double:
            self._driver_double = _driver_double(self._driver.root / "cuda-driver")
        query = "--query-gpu=name,driver_version,memory.total"
        phase.put("gpu", said("nvidia-smi", query, "--format=csv,noheader"))
        phase.put("kernel", os.uname().release)
        phase.put("host_memory", asdict(host_memory()))
        with variables(self._environment({})):
            phase.put("driver", cuda_states([os.getpid()]))
        print(f"  {json.dumps(phase.seen)}", flush=True)

    def _model(self, name: str, arguments: Mapping[str, Any], layers: int) -> Path:
        given = {**models.TWO_ENGINES, **arguments, **self._driver.extra}
        shape = {**models.SHAPE, "num_hidden_layers": layers}
        directory = self._driver.root / "models" / f"{name}-{layers}"
        return models.large(directory, self._driver.small, given, shape)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {**self._driver.environment, **self._driver_double, **more}

    def _alone(self, model: Path, more: Mapping[str, str]) -> Callable[[Phase, str], bool]:
        def part(phase: Phase, name: str) -> bool:
            with variables(self._environment(more)):
                return asyncio.run(self._park_alone(phase, name, model))

        return part

    def _snapshot(self, phase: Phase, name: str) -> bool:
        python = Path(sys.executable) if self._driver.rehearsal else self._driver.python
        place = self._driver.root / "snapshot"
        environment = self._driver.environment
        made = Snapshot(python, self._driver.small, place, environment, self._driver.until)
        return made.measure(phase, name)

    async def _park_alone(self, phase: Phase, name: str, model: Path) -> bool:
        """Park an engine twice; returns whether it was off the GPU and said the same afterwards."""
        python = None if self._driver.rehearsal else self._driver.python
        logs = self._driver.logs / f"{phase.name}-{name.replace(' ', '-')}"
        load_s = max(30.0, min(_LOAD_S, self._left() - 30))
        parking, went = EngineParking(), True
        async with lone_engine(model, python, logs, load_s) as engine:
            phase.put(f"{name}: cold start s", round(engine.load_s, 1))
            ids = [prompt.ids for prompt in prompts.make(model, _PROMPTS, 64)]
            tokens = Tokens(engine, ids, _TOKENS)
            try:
                expected, _ = await tokens.ask(_ANSWER_S)
                phase.put(f"{name}: running", self._seen(engine))
                for number in (1, 2):
                    went &= await self._once(phase, name, number, engine, parking, tokens, expected)
            finally:
                tokens.close()
                parking.close()
        return went

    async def _once(
        self,
        phase: Phase,
        name: str,
        number: int,
        engine: KeptEngine,
        parking: EngineParking,
        tokens: Tokens,
        expected: list[list[int]],
    ) -> bool:
        """Park the engine and take it back; whether it was checkpointed and says the same."""
        parked = await parking.park(engine)
        print(f"  {name} {number}: {parked}", flush=True)
        row: dict[str, Any] = {"number": number, "parked": asdict(parked)}
        row["while_parked"] = await asyncio.to_thread(self._seen, engine)
        began = time.monotonic()
        row["unpark_s"] = round(await parking.unpark(engine), 3)
        found, first = await tokens.ask(_ANSWER_S)
        row["first_token_s"] = round(row["unpark_s"] + first, 3)
        row["all_tokens_s"] = round(time.monotonic() - began, 3)
        row["same"] = found == expected
        row["reason"] = parked.reason
        phase.add(f"{name}: parked", row)
        told = f"back in {row['unpark_s']} s, first token after {row['first_token_s']} s"
        print(f"  {name} {number}: {told}, same tokens: {row['same']}", flush=True)
        phase.check(f"{name}: the same tokens after parking {number}", row["same"],
                    (expected, found))  # fmt: skip
        return bool(parked.pids) and bool(row["same"])

    def _seen(self, engine: KeptEngine) -> dict[str, Any]:
        pids = sorted(reaper.descendants(engine.root_pid))
        return {"cuda": cuda_states(pids), "memory": gpu_memory()}

    def _served(
        self, model: Path, more: Mapping[str, str], way: str = ""
    ) -> Callable[[Phase, str], bool]:
        """Kill a server's engine under streams, twice if there is time for it and a spare.

        `way` is how that is parked, none without one. Returns whether it came back each time.
        """

        def part(phase: Phase, name: str) -> bool:
            label = f"{phase.name}-{name.replace(' ', '-')}"
            environment = self._environment({"RESUME": "1", **more})
            server = self._driver.ours(label, model, END_ID="-1", **environment)
            with running(server):
                self._driver.put_start(phase, server)
                streams = UnderStreams(server, model, self._driver.until)
                phase.put(f"{name}: undisturbed", streams.undisturbed)
                went = self._kill(phase, f"{name} 1", server, streams, way)
                if went and way and self._left() - self._later_s > _AGAIN_S:
                    went = self._kill(phase, f"{name} 2", server, streams, way)
                phase.put(f"{name}: keeper's log", _keeper_log(server).splitlines()[-20:])
            return went

        return part

    def _kill(self, phase: Phase, name: str, server: Ours, streams: UnderStreams, way: str) -> bool:
        part, _, number = name.rpartition(" ")
        if way:
            self._wait_for_spare(phase, name, server, way)
        states = self._states(server)
        # Those that have CUDA and run; a spare that sleeps does, too, but is younger.
        running = () if isinstance(states, str) else [
            pid for pid, state in states.items() if state == "RUNNING"
        ]  # fmt: skip
        row = streams.kill(*killed_worker.victim(server, running))
        phase.add(f"{part}: returns", {"number": int(number), **row})
        return streams.check(phase, name, row)

    def _wait_for_spare(self, phase: Phase, name: str, server: Ours, way: str) -> None:
        """Wait until a spare is parked, or time is short; notes what is seen then."""
        part, _, number = name.rpartition(" ")
        began = time.monotonic()
        said: list[str] = []
        while self._left() > 30 and time.monotonic() - began < _SPARE_S:
            said = re.findall(_OF_SPARE, _keeper_log(server))
            if len(said) >= int(number):
                break
            time.sleep(0.5)
        seen = {
            "waited_s": round(time.monotonic() - began, 1),
            "said": said[-1:],
            "cuda": self._states(server),
            "memory": gpu_memory(),
            "host_memory": asdict(host_memory()),
        }
        phase.add(f"{part}: spare", seen)
        print(f"  {name}: spare {seen}", flush=True)
        as_told = len(said) >= int(number) and said[-1].startswith(way)
        phase.check(f"{name}: the spare is {way}", as_told, seen)

    def _states(self, server: Ours) -> dict[int, str] | str:
        with variables(self._environment({})):
            return cuda_states(sorted(killed_worker.computing(server)))


def _keeper_log(server: Ours) -> str:
    paths = [path for path in server.logs() if path.name == "keeper.log"]
    return "".join(path.read_text("utf-8", "replace") for path in paths)


def _texts(endpoint: Endpoint, texts: Sequence[Prompt]) -> list[Any]:
    """Greedy answers, one after another; TimeoutError where one takes too long."""

    async def answers() -> list[Any]:
        found = []
        for prompt in texts:
            request = endpoint.request(prompt, _TOKENS)
            asked = ask(WorkerResult(), endpoint, request, len(prompt.ids), _TOKENS)
            found.append(endpoint.output(await asyncio.wait_for(asked, _ANSWER_S)))
        return found

    return asyncio.run(answers())


def _driver_double(directory: Path) -> dict[str, str]:
    """Environment with the double of NVIDIA's driver, made anew."""
    sys.path.append(str(REPOSITORY / "tests"))
    from cuda_driver import CudaDriver

    shutil.rmtree(directory, ignore_errors=True)
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "doubles")))
    return {**CudaDriver(directory).environment, "PYTHONPATH": path}
