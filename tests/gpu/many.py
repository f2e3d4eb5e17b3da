"""Several GPUs: a model of Llama 3.1 70B's shape over all of them, and half of them each."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import bench
import killed_worker
import models
import multicast
import prompts
from endpoints import Endpoint
from killed_worker import Stream
from results import Phase
from servers import NotStarted, Ours, Server, on_cores, shared_cores

if TYPE_CHECKING:
    from verify import Driver

AT_ONCE = 512
# Of 512 requests of 512 tokens each, and some: what 80 layers on 8 GPUs keep on each of them.
_KV_CACHE = 11 << 30
_KILLED_STREAMS, _KILLED_TOKENS = 64, 512
_QUICK_FAILURE_S = 180
# A phase's seconds, and how many it needs at least.
BUDGETS = {"many": 640, "kill": 300, "peer": 260, "pair": 360, "abilities": 170}
LEAST = {"many": 240, "kill": 60, "pair": 200, "abilities": 90, "peer": 220}

Endpoints = Sequence[tuple[Endpoint, Server]]


class ManyGPUs:
    """Phases on all GPUs; what `many` starts stays for `kill`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._options = driver.options
        self._kept = ExitStack()
        self._mine: Ours | None = None
        self._servers, self._load = shared_cores()

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {"many": self.many, "kill": self.kill, "peer": self.peer, "pair": self.pair}

    def close(self) -> None:
        """Stop what is still running."""
        self._mine = None
        self._kept.close()

    def model(self, engines: int = 1) -> Path:
        """The model for one engine on all GPUs, or for two on half of them each."""
        gpus = self._options.gpus
        layers = self._options.layers or 80 * gpus // 8
        arguments = {
            "tensor_parallel_size": gpus // engines,
            **({"data_parallel_size": engines} if engines > 1 else {}),
            "max_num_seqs": AT_ONCE // engines,
            "max_model_len": 4096,
            "kv_cache_memory_bytes": _KV_CACHE,
            "gpu_memory_utilization": 0.4 if engines == 1 else 0.6,
            "enable_prefix_caching": False,
            "attention_backend": "FLASH_ATTN",
            **self._driver.extra,
        }
        shape = {**models.SHAPE_70B, "num_hidden_layers": layers}
        name = f"llama-70b-{layers}-layers-{engines}x{gpus // engines}"
        directory = self._driver.root / "models" / name
        return models.large(directory, self._driver.small, arguments, shape)

    def many(self, phase: Phase) -> None:
        """One engine on all GPUs beside ``vllm serve``, both running, asked in turn."""
        model = self.model()
        self._describe(phase, model)
        with ExitStack() as stack:
            first = self._peer("many", model, rust=self._options.front_end == "rust")
            if first:
                stack.enter_context(self._launched(first[0][1]))
            mine = self._keep(phase, model)
            try:
                for _, server in first:
                    server.wait()
            except NotStarted as error:
                phase.check("vllm serve starts", False, error)
                if not first:
                    raise
                other = self._options.front_end == "python"
                first = self._peer("many-again", model, rust=other)
                stack.enter_context(self._launched(first[0][1]))
                first[0][1].wait()
            self._measure(phase, model, [*first, *self._driver.endpoints(mine)])

    def peer(self, phase: Phase) -> None:
        """The same beside ``vllm serve`` with its other front end; /v1 alone of ours."""
        model = self.model()
        self._describe(phase, model)
        with ExitStack() as stack:
            first = self._peer("peer", model, rust=self._options.front_end == "python")
            for _, server in first:
                stack.enter_context(self._launched(server))
            mine = self._keep(phase, model)
            for _, server in first:
                server.wait()
            own = [pair for pair in self._driver.endpoints(mine) if pair[0].name == "/v1"]
            self._measure(phase, model, [*first, *own])
        self.close()

    def kill(self, phase: Phase) -> None:
        """Kill -9 of one worker under 64 streams, and the way back."""
        model = self.model()
        self._describe(phase, model)
        mine = self._keep(phase, model)
        endpoint = Endpoint("/v1", mine.openai)
        texts = prompts.make(model, _KILLED_STREAMS, bench.INPUT_TOKENS, seed=22)

        until = self._driver.until

        async def streams(then: Callable[[], Awaitable[None]] | None = None) -> list[Stream]:
            patience_s = max(30.0, until - time.monotonic() - 20)
            return await killed_worker.run(endpoint, texts, _KILLED_TOKENS, patience_s, then)

        with on_cores(self._load):
            expected, again = (asyncio.run(streams()) for _ in range(2))
        phase.put("undisturbed", killed_worker.judge(again, expected))
        before = bench.greedy(endpoint, texts[:1], 64)
        found: dict[str, float | None] = {}

        async def disturbed() -> None:
            back: list[asyncio.Task[dict[str, float | None]]] = []

            async def strike() -> None:
                role, pid = _victim(mine)
                phase.put("killed", f"{role}, one of {list(mine.processes().values()).count(role)}")
                print(f"  kill -9 {pid} ({role})", flush=True)
                os.kill(pid, signal.SIGKILL)
                began = time.monotonic()
                coming = killed_worker.until_back(mine, endpoint, texts[0], began, until)
                back.append(asyncio.create_task(coming))

            seen = await streams(strike)
            phase.put("streams", killed_worker.judge(seen, expected))
            print(f"  {phase.seen['streams']}", flush=True)
            found.update(await back[0])

        with on_cores(self._load):
            asyncio.run(disturbed())
        phase.put("return", found)
        print(f"  {found}", flush=True)
        judged = phase.seen["streams"]
        phase.check("no stream hangs", not judged["hung"], judged)
        phase.check("no stream is wrong", judged["wrong"] <= phase.seen["undisturbed"]["wrong"],
                    judged)  # fmt: skip
        phase.check("no stream is lost", not judged["lost"], judged)
        if phase.check("it answers again", found["first_token_s"] is not None, found):
            after = bench.greedy(endpoint, texts[:1], 64)
            phase.check("as before", after == before, (before, after))
        else:
            self.close()

    def pair(self, phase: Phase) -> None:
        """Two engines on half of the GPUs each, behind one front end: vLLM's data parallelism."""
        self.close()
        model = self.model(2)
        self._describe(phase, model)
        mine = self._ours("pair-ours", model)
        with self._launched(mine):
            # It takes a minute or two to start, and leaves room for a small model.
            if "abilities" in self._options.phase and self._driver.seconds_left() > 360:
                self._driver.run_phase("abilities")
            mine.wait()
            own = self._driver.endpoints(mine)
            order = {"/v1": 0, "triton": 1, "cog": 2}
            self._measure(phase, model, sorted(own, key=lambda pair: order[pair[0].name]))

    def _describe(self, phase: Phase, model: Path) -> None:
        given = (model / "model.json").read_text("utf-8")
        phase.put("model", {"name": model.name, "gpus": self._options.gpus, "arguments": given})

    def _measure(self, phase: Phase, model: Path, endpoints: Endpoints) -> None:
        for server in {id(server): server for _, server in endpoints}.values():
            self._driver.put_start(phase, server)
            wrong = multicast.left_on(server)
            if not phase.check(f"{server.name}: NVLink multicast is off", not wrong, wrong):
                raise RuntimeError("NVLink multicast must be off: nothing more is run")
            chosen = server.start_times().get("all_reduce", "")
            kept = not any(name in chosen for name in ("SYMM", "FLASHINFER"))
            phase.check(f"{server.name}: all-reduce without it", kept, chosen)
        phase.put(
            "gpu_memory", _said("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader")
        )
        with on_cores(self._load):
            self._driver.compare(phase, model, endpoints, count=4)

    def _keep(self, phase: Phase, model: Path) -> Ours:
        """Our server over all GPUs, which stays until `close`; what fails soon is tried again."""
        if self._mine is not None:
            return self._mine
        for attempt in (1, 2):
            mine = self._ours(f"{phase.name}-ours-{attempt}", model)
            try:
                with ExitStack() as stack:
                    stack.enter_context(self._launched(mine))
                    mine.wait()
                    self._kept.push(stack.pop_all())
                self._mine = mine
                return mine
            except NotStarted as error:
                phase.check(f"ours starts, attempt {attempt}", False, error)
                if attempt == 2 or time.monotonic() - mine.began > _QUICK_FAILURE_S:
                    raise
        raise AssertionError

    def _ours(self, name: str, model: Path) -> Ours:
        return self._driver.ours(name, model, END_ID="-1")

    def _peer(self, name: str, model: Path, *, rust: bool) -> list[tuple[Endpoint, Server]]:
        return self._driver.theirs(name, model, rust=rust)

    @contextmanager
    def _launched(self, server: Server) -> Iterator[None]:
        """Launch a server on the servers' cores, and stop it in the end."""
        server.cores = self._servers
        try:
            server.launch()
            yield
        finally:
            server.stop()


def _victim(server: Server) -> tuple[str, int]:
    """A process whose death takes an engine with it: a worker, else what there is."""
    found = server.processes()
    for role in ("vLLM worker", "vLLM EngineCore", "our host of AsyncLLM"):
        if pids := sorted(pid for pid, name in found.items() if name == role):
            return role, pids[-1]
    raise RuntimeError(f"no engine among {sorted(set(found.values()))}")


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        return str(error)
    return " ".join(done.stdout.split())
