"""Several GPUs: a model of Llama 3.1 70B's shape over all of them, and half of them each."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import killed_worker
import models
import multicast
from endpoints import Endpoint
from results import Phase
from servers import NotStarted, Ours, Server, on_cores

if TYPE_CHECKING:
    from verify import Driver

AT_ONCE = 512
# Of 512 requests of 512 tokens each, and some: what 80 layers on 8 GPUs keep on each of them.
_KV_CACHE = 11 << 30
_QUICK_FAILURE_S = 180
# A phase's seconds, and how many it needs at least.
BUDGETS = {"many": 640, "kill": 300, "peer": 260, "pair": 360, "replicas": 540, "abilities": 170}
LEAST = {"many": 150, "kill": 60, "pair": 130, "replicas": 130, "abilities": 90, "peer": 150}

Endpoints = Sequence[tuple[Endpoint, Server]]


class ManyGPUs:
    """Phases on all GPUs; what `many` starts stays for `kill`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._options = driver.options
        self._kept = ExitStack()
        self._mine: Ours | None = None
        self._servers, self._load = driver.server_cores, driver.load_cores

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {
            "many": self.many,
            "kill": self.kill,
            "peer": self.peer,
            "pair": self.pair,
            "replicas": self.replicas,
        }

    def close(self) -> None:
        """Stop what is still running."""
        self._mine = None
        self._kept.close()

    def model(self, engines: int = 1, *, apart: bool = False) -> Path:
        """The model for one engine on all GPUs, or for two on half of them each.

        Two are vLLM's data parallelism, or `apart`.
        """
        gpus = self._options.gpus
        layers = self._options.layers or 80 * gpus // 8
        arguments = {
            "tensor_parallel_size": gpus // engines,
            **({"data_parallel_size": engines} if engines > 1 and not apart else {}),
            "max_num_seqs": AT_ONCE // engines,
            "max_model_len": 4096,
            "kv_cache_memory_bytes": _KV_CACHE,
            "gpu_memory_utilization": 0.4 if engines == 1 else 0.6,
            "enable_prefix_caching": False,
            "attention_backend": "FLASH_ATTN",
            **self._driver.extra,
        }
        shape = {**models.SHAPE_70B, "num_hidden_layers": layers}
        name = f"llama-70b-{layers}-layers-{engines}x{gpus // engines}{'-apart' * apart}"
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
        if not self._kill(phase, model, mine):
            self.close()

    def _kill(self, phase: Phase, model: Path, mine: Ours) -> bool:
        """Whether the server answers as before, after the kill of a process of an engine."""
        with on_cores(self._load):
            streams = killed_worker.UnderStreams(mine, model, self._driver.until)
            phase.put("undisturbed", streams.undisturbed)
            roles = list(mine.processes().values())
            row = streams.kill(*killed_worker.victim(mine))
            of = roles.count(row["killed"])
            phase.put("killed", f"{row.pop('killed')}, one of {of}")
            phase.put("streams", row["streams"])
            phase.put("return", {key: row[key] for key in row if key != "streams"})
            return streams.check(phase, "", row)

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
            self._measure_own(phase, model, mine)

    def replicas(self, phase: Phase) -> None:
        """The same with ENGINE_REPLICAS, where we choose the engine; then kill -9 of one."""
        self.close()
        model = self.model(2, apart=True)
        self._describe(phase, model)
        mine = self._ours("replicas-ours", model, ENGINE_REPLICAS="2")
        with self._launched(mine):
            mine.wait()
            self._measure_own(phase, model, mine)
            phase.check("two engines serve", _engines(mine) == 2)
            self._kill(phase, model, mine)
            ready = phase.seen["return"]["not_ready_s"] is None
            phase.check("it was ready all the time", ready, phase.seen["return"])
            began = time.monotonic()
            while (left := self._driver.until - time.monotonic()) > 0 and _engines(mine) < 2:
                time.sleep(min(1.0, left))
            phase.put("both_serve_after_s", round(time.monotonic() - began, 1))
            phase.check("both serve again", _engines(mine) == 2)

    def _measure_own(self, phase: Phase, model: Path, mine: Ours) -> None:
        order = {"/v1": 0, "triton": 1, "cog": 2}
        own = self._driver.endpoints(mine)
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

    def _ours(self, name: str, model: Path, **environment: str) -> Ours:
        return self._driver.ours(name, model, END_ID="-1", RESUME="1", **environment)

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


def _engines(server: Ours) -> int:
    """Number of engines that serve, as /metrics tells it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.openai}/metrics", timeout=30) as answer:
        found = re.search(r"^cog_triton_engines (\S+)$", answer.read().decode(), re.M)
    return int(float(found[1])) if found else 0


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        return str(error)
    return " ".join(done.stdout.split())
