"""Engines parked off the GPU: alone, and as the spare of a server whose engine is killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench
import killed_worker
import models
import prompts
from arguments import REPOSITORY
from endpoints import Endpoint
from load import WorkerResult, ask
from lone_engine import Tokens, cuda_states, gpu_memory, lone_engine, said, variables
from parked_servers import restarted, swapped
from prompts import Prompt
from results import Phase
from servers import Ours, running

from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.vllm_version import installed_version
from cog_triton.keeper.engine_parking import EngineParking
from cog_triton.keeper.kept_engine import KeptEngine
from cog_triton.system import reaper
from cog_triton.system.host_memory import host_memory

if TYPE_CHECKING:
    from verify import Driver

BUDGETS = {"park": 560, "park-tp": 560, "park-serve": 560}
LEAST = {"park": 120, "park-tp": 120, "park-serve": 60}
# Room for two engines of 8B on a GPU of 80 GB: the spare loads while the first one serves.
_ARGUMENTS: Mapping[str, Any] = {
    "max_num_seqs": 256,
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 12 << 30,
    "gpu_memory_utilization": 0.4,
    "enable_prefix_caching": False,
    "attention_backend": "FLASH_ATTN",
}
_TP_LAYERS = 8
_ANSWER_S = 60.0
_LOAD_S = 240.0
_PROMPTS, _TOKENS = 4, 32
_WORKING = ("vLLM worker", "vLLM EngineCore", "our host of AsyncLLM")
_APART = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_NVLS_ENABLE"), "0"),
}
_SUSPENDED = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


class Parking:
    """Phases `park`, `park-serve` (one GPU) and `park-tp` (two GPUs, tensor parallel)."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._driver_double: dict[str, str] = {}

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {"park": self.park, "park-tp": self.park_tp, "park-serve": self.park_serve}

    def park(self, phase: Phase) -> None:
        """One GPU: an engine alone, then a server without a spare and one with it."""
        self._machine(phase)
        model = self._model("park", {}, self._driver.options.layers or 32)
        self._step(self._alone, phase, "alone", 60, model, {})
        self._step(self._served, phase, "no spare", 100, model, {})
        self._step(self._served, phase, "spare", 120, model, {"SPARE_ENGINE": "1"})

    def park_tp(self, phase: Phase) -> None:
        """Two GPUs: what NCCL must give up for a checkpoint, then a server with a spare."""
        self._machine(phase)
        layers = self._driver.options.layers or _TP_LAYERS
        best: tuple[Path, dict[str, str]] | None = None
        for name, arguments, environment in self._variants():
            both = {"tensor_parallel_size": 2, **arguments}
            model = self._model(f"park-tp-{name.replace(' ', '-')}", both, layers)
            went = self._step(self._alone, phase, name, 90, model, environment)
            best = best or ((model, environment) if went else None)
        model, environment = best or (
            self._model("park-tp", {"tensor_parallel_size": 2}, layers),
            {},
        )
        spare = {"SPARE_ENGINE": "1", **environment}
        self._step(self._served, phase, "spare", 120, model, spare)

    def park_serve(self, phase: Phase) -> None:
        """One GPU: a server restarted around its parked engine, then two models in turn."""
        self._machine(phase)
        layers = self._driver.options.layers or 32
        one, two = (self._model(f"park-serve-{name}", {}, layers) for name in ("one", "two"))
        self._step(self._restarted, phase, "restart", 60, one, {"PARK_ENGINE": "1"})
        swapping = {"SERVED_MODEL_NAME": "", "SWAP_RESIDENCE": "0"}
        self._step(partial(self._swapped, two), phase, "swap", 100, one, swapping)

    def _restarted(self, phase: Phase, name: str, model: Path, more: Mapping[str, str]) -> bool:
        server = self._driver.ours(f"{phase.name}-{name}", model, **self._environment(more))
        texts = prompts.make(model, 2, bench.INPUT_TOKENS, seed=31)
        return restarted(phase, server, lambda: _texts(Endpoint("/v1", server.openai), texts))

    def _swapped(
        self, second: Path, phase: Phase, name: str, model: Path, more: Mapping[str, str]
    ) -> bool:
        server = self._driver.ours(f"{phase.name}-{name}", model, **self._environment(more))
        return swapped(phase, server, second)

    def _variants(self) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
        """Ways to set up ranks so that the driver may checkpoint them, the most promising first."""
        own: dict[str, Any] = {"disable_custom_all_reduce": True}
        python = None if self._driver.rehearsal else str(self._driver.python)
        found = [("sockets", own, _APART), ("as usual", {}, {})]
        if "enable_nccl_comm_suspend" in types_of(installed_version(python)).engine_args:
            suspended = {**own, "enable_nccl_comm_suspend": True}
            found.insert(0, ("NCCL suspended", suspended, _SUSPENDED))
        return found

    def _step(
        self,
        work: Callable[[Phase, str, Path, Mapping[str, str]], bool],
        phase: Phase,
        name: str,
        least_s: float,
        model: Path,
        environment: Mapping[str, str],
    ) -> bool:
        """Run one part, of which none keeps the next from running; returns whether it went well."""
        if (left := self._left()) < least_s:
            print(f"  {name}: not run, {left:.0f} s are left", flush=True)
            phase.put(f"{name}: not run", f"{left:.0f} s left")
            return False
        print(f"  -- {name}", flush=True)
        try:
            return work(phase, name, model, environment)
        except Exception as error:  # noqa: BLE001 - the other parts are to be seen, too
            phase.check(f"{name}: went through", False, f"{type(error).__name__}: {error}")
            return False

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
        given = {**_ARGUMENTS, **arguments, **self._driver.extra}
        shape = {**models.SHAPE, "num_hidden_layers": layers}
        directory = self._driver.root / "models" / f"{name}-{layers}"
        return models.large(directory, self._driver.small, given, shape)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {**self._driver.environment, **self._driver_double, **more}

    def _alone(self, phase: Phase, name: str, model: Path, more: Mapping[str, str]) -> bool:
        with variables(self._environment(more)):
            return asyncio.run(self._park_alone(phase, name, model))

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

    def _served(self, phase: Phase, name: str, model: Path, more: Mapping[str, str]) -> bool:
        """Kill a server's engine, twice with a spare; returns whether it came back each time."""
        label = f"{phase.name}-{name.replace(' ', '-')}"
        server = self._driver.ours(label, model, END_ID="-1", **self._environment(more))
        went = True
        with running(server):
            self._driver.put_start(phase, server)
            endpoint = Endpoint("/v1", server.openai)
            texts = prompts.make(model, 2, bench.INPUT_TOKENS, seed=31)
            before = _texts(endpoint, texts)
            for number in (1, 2) if "SPARE_ENGINE" in more else (1,):
                if self._left() < 45:
                    break
                if "SPARE_ENGINE" in more:
                    self._wait_for_spare(phase, name, server)
                went &= self._kill(phase, name, number, server, endpoint, texts, before)
            phase.put(f"{name}: keeper's log", _keeper_log(server).splitlines()[-20:])
        return went

    def _kill(
        self,
        phase: Phase,
        name: str,
        number: int,
        server: Ours,
        endpoint: Endpoint,
        texts: Sequence[Prompt],
        before: list[Any],
    ) -> bool:
        role, pid = self._victim(server)
        print(f"  {name} {number}: kill -9 {pid} ({role})", flush=True)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        until = min(self._driver.until, began + _LOAD_S)
        back = asyncio.run(killed_worker.until_back(server, endpoint, texts[0], began, until))
        row: dict[str, Any] = {"number": number, "killed": role, **back}
        phase.add(f"{name}: returns", row)
        print(f"  {name} {number}: {back}", flush=True)
        if not phase.check(
            f"{name}: it answers again, {number}", back["first_token_s"] is not None, server.tail()
        ):
            return False
        after = _texts(endpoint, texts)
        return phase.check(f"{name}: as before, {number}", after == before, (before, after))

    def _victim(self, server: Ours) -> tuple[str, int]:
        """The process that computes: of those with CUDA that run, the eldest, which serves."""
        found = {pid: role for pid, role in server.processes().items() if role in _WORKING}
        with variables(self._environment({})):
            states = cuda_states(sorted(found))
        if isinstance(states, dict) and states:
            found = {pid: found[pid] for pid, state in states.items() if state == "RUNNING"}
        for role in _WORKING:
            if pids := [pid for pid, of in found.items() if of == role]:
                return role, min(pids, key=_age_key)
        raise RuntimeError(f"no engine among {sorted(set(server.processes().values()))}")

    def _wait_for_spare(self, phase: Phase, name: str, server: Ours) -> None:
        """Wait until a spare is checkpointed, or time is short; notes what is seen meanwhile."""
        began = time.monotonic()
        states: dict[int, str] | str = {}
        while self._left() > 60 and time.monotonic() - began < _LOAD_S:
            pids = sorted(pid for pid, role in server.processes().items() if role in _WORKING)
            with variables(self._environment({})):
                states = cuda_states(pids)
            if isinstance(states, str) or "CHECKPOINTED" in states.values():
                break
            if "is parked: asleep" in _keeper_log(server):
                break
            time.sleep(1)
        seen = {
            "waited_s": round(time.monotonic() - began, 1),
            "cuda": states,
            "memory": gpu_memory(),
            "host_memory": asdict(host_memory()),
        }
        phase.add(f"{name}: spare", seen)
        print(f"  {name}: spare {seen}", flush=True)
        ready = isinstance(states, dict) and "CHECKPOINTED" in states.values()
        phase.check(f"{name}: the spare is parked", ready, seen)


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


def _age_key(pid: int) -> int:
    """Start of a process, in ticks since the machine's."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _driver_double(directory: Path) -> dict[str, str]:
    """Environment with the double of NVIDIA's driver, made anew."""
    sys.path.append(str(REPOSITORY / "tests"))
    from cuda_driver import CudaDriver

    shutil.rmtree(directory, ignore_errors=True)
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "doubles")))
    return {**CudaDriver(directory).environment, "PYTHONPATH": path}
