"""Phases of scripts/verify-gpu; arguments.py has its command line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import arguments
import bench
import embedder
import machine
import many
import models
import multicast
import parking
import profiles
import prompts
import pruned
import resumed
import start_marks
import table
import vision_model
from abilities import Abilities, Images
from adapters import with_adapters
from arguments import REPOSITORY
from checks import Checks, load_all_at_once
from client import Client
from endpoints import Endpoint, Predictions, TritonIds
from many import ManyGPUs
from parking import Parking
from results import Phase, Results
from servers import (
    Ours,
    Server,
    on_cores,
    ours,
    running,
    shared_cores,
    stopped_at_the_end,
    vllm_serve,
)

from cog_triton.errors import ModelUnavailable

# For every server: vLLM's own choices need FlashInfer, which is compiled when first used. Without
# prefix caching, which would know the prompts of another endpoint of the same engine.
_COMMON = {
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.25,
    "attention_backend": "FLASH_ATTN",
}
_SMALL = {
    "max_num_seqs": 1024,
    "max_model_len": 8192,
    "kv_cache_memory_bytes": 16 << 30,
    **_COMMON,
}
# Room for 512 requests of 512 tokens, and for two engines on a GPU of 139 GiB. At 512 at once it is
# as with vLLM's default, 1024.
_LARGE = {
    "max_num_seqs": 512,
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 36 << 30,
    **_COMMON,
}
_ADAPTED = {
    "max_num_seqs": 64,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 2 << 30,
    **_COMMON,
    "gpu_memory_utilization": 0.05,
}
_TOOLS_TEMPLATE = REPOSITORY / "configs" / "chat_templates" / "chatml-tools.jinja"
_ROLE = "vLLM EngineCore"
_BUDGET_S = 540
_BUDGETS = {
    **{**many.BUDGETS, **parking.BUDGETS},
    **{**resumed.BUDGETS, **start_marks.BUDGETS},
}
_LEAST = {
    **{**many.LEAST, **parking.LEAST},
    **{**resumed.LEAST, **start_marks.LEAST},
}


class Driver:
    """Runs the phases over one set-up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.root: Path = options.root
        self.results = Results(self.root / "results.json")
        self.logs = self.root / "logs"
        self.extra = dict(options.argument)
        small = self.root / "models" / "smollm2"
        self.small = models.small(small, {**_SMALL, **self.extra})
        large = self.root / "models" / "llama-8b"
        self.large = models.large(large, self.small, {**_LARGE, **self.extra})
        shape = {**models.SHAPE_1B, "max_position_embeddings": 8192}
        billion = self.root / "models" / "llama-1b"
        self.billion = models.large(billion, self.small, {**_SMALL, **self.extra}, shape)
        self.python: Path = options.engine_python or Path(sys.executable)
        self.rehearsal: bool = options.rehearse
        self.until = 0.0
        self.failed = 0
        self._deadline = time.monotonic() + options.deadline
        self._begun: set[str] = set()
        self.server_cores, self.load_cores = shared_cores()
        self._many = ManyGPUs(self)
        self._parking = Parking(self)

    def run(self) -> int:
        """Run every phase that was asked for; returns the number of failed checks."""
        try:
            for name in self.options.phase:
                self.run_phase(name)
        finally:
            self._many.close()
        print(f"tables: {self.root / 'results.md'}; results: results.json, samples.json beside it")
        return self.failed

    def seconds_left(self) -> float:
        """Seconds until the deadline of all phases."""
        return self._deadline - time.monotonic()

    def run_phase(self, name: str) -> None:
        """Run one phase, unless another has run it already or too little time is left."""
        if name in self._begun:
            return
        self._begun.add(name)
        if (left := self.seconds_left()) < _LEAST.get(name, 0):
            print(f"== {name}: not run, {left:.0f} s are left", flush=True)
            return
        phase, began, outer = self.results.phase(name), time.monotonic(), self.until
        budget = self.options.budget or _BUDGETS.get(name, _BUDGET_S)
        self.until = began + min(budget, left)
        print(f"== {name}", flush=True)
        try:
            self.phases()[name](phase)
            self._write_tables()
        except Exception as error:  # noqa: BLE001 - the other phases are to be seen, too
            phase.check("the phase went through", False, f"{type(error).__name__}: {error}")
        self.until = outer
        phase.put("seconds", round(time.monotonic() - began, 1))
        self.failed += len(phase.failed)
        took = phase.seen["seconds"]
        print(f"== {name}: {took} s, failed: {phase.failed or 'none'}", flush=True)

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {
            "machine": partial(machine.note, python=self.python, rehearsal=self.rehearsal),
            "checks": self.checks,
            "bench": partial(self.bench, model=self.large, fronts=("rust",)),
            "bench-python": partial(self.bench, model=self.large, fronts=("python",)),
            "1b": partial(self.bench, model=self.billion, fronts=("rust", "python")),
            "small": partial(self.bench, model=self.small, fronts=("rust", "python")),
            "abilities": self.abilities,
            **pruned.Pruned(self).phases(),
            **self._many.phases(),
            **self._parking.phases(),
            **resumed.Resumed(self).phases(),
            **start_marks.Starts(self).phases(),
        }

    def _write_tables(self) -> None:
        (self.root / "results.md").write_text(table.document(self.results.seen), "utf-8")

    def checks(self, phase: Phase) -> None:
        """Check two models served at once, then a crash of the small one's engine."""
        served = [
            ("SmolLM2", self.small, self.ours("checks-small", self.small)),
            ("Llama 8B", self.large, self.ours("checks-large", self.large)),
        ]
        if self.rehearsal:
            del served[1]
        texts = prompts.make(self.small, 64, 256)
        with running(*(server for _, _, server in served)):
            made = []
            for name, model, server in served:
                phase.put(f"{name}: start", {"seconds": server.start_s, **server.start_times()})
                sensible = name == "SmolLM2" and not self.rehearsal
                made.append(Checks(name, Client(server), phase, model, texts, sensible))
                made[-1].all()
            load_all_at_once(made)
            made[0].restart("our host of AsyncLLM" if self.rehearsal else _ROLE)

    def abilities(self, phase: Phase) -> None:
        """Check what a request may ask beyond text, over the small model with two adapters.

        Images over another model, embeddings over the small one as an embedder.
        """
        directory = self.root / "models" / "smollm2-adapters"
        arguments = {**_ADAPTED, **self.extra}
        model = with_adapters(self.small, directory, arguments, _TOOLS_TEMPLATE)
        environment = {"CHAT_TEMPLATE": str(model / _TOOLS_TEMPLATE.name)}
        server = self.ours("abilities", model, **environment)
        vision = self.ours("vision", self._vision())
        pooling = embedder.write(self.small, self.root / "models" / "smollm2-embedder", arguments)
        embeds = self.ours("embedder", pooling)
        with stopped_at_the_end(server, vision, embeds):
            server.launch()
            vision.launch()
            embeds.launch()
            server.wait()
            self.put_start(phase, server)
            texts = prompts.make(model, 4, 64)
            Abilities(Client(server), phase, texts, not self.rehearsal).all()
            vision.wait()
            self.put_start(phase, vision)
            Images(Client(vision), phase).all()
            embeds.wait()
            self.put_start(phase, embeds)
            size = json.loads((model / "config.json").read_text("utf-8"))["hidden_size"]
            embedder.Embeddings(Client(embeds), phase, texts, size).all()

    def _vision(self) -> Path:
        """A model that takes images; the double takes one character for an image."""
        mark = "\x01" if self.rehearsal else vision_model.PLACEHOLDER
        arguments = {**_ADAPTED, "kv_cache_memory_bytes": 1 << 30, **self.extra}
        return vision_model.write(self.root / "models" / "qwen2-vl", arguments, mark)

    def bench(self, phase: Phase, model: Path, fronts: Sequence[str]) -> None:
        """Benchmark ours beside ``vllm serve``, by each of `fronts`: all running, asked in turn.

        Beside the Python front end alone, of ours /v1 only: the others' figures are in `bench`.
        """
        mine = self.ours(f"{phase.name}-ours", model, END_ID="-1")
        own = self.endpoints(mine)
        peers = [pair for f in fronts for pair in self.theirs(phase.name, model, rust=f == "rust")]
        endpoints = [*peers, *(own if "rust" in fronts else own[1:2])]
        servers = list({id(server): server for _, server in endpoints}.values())
        for server in servers:
            server.cores = self.server_cores
        with running(*servers):
            for server in servers:
                self.put_start(phase, server)
            with on_cores(self.load_cores):
                self.compare(phase, model, endpoints)
            texts = prompts.make(model, 512, bench.INPUT_TOKENS, seed=5)
            spy, target = self.python.parent / "py-spy", self.root / "profiles"
            if self.options.profile:
                phase.check("py-spy is in the environment", spy.is_file(), str(spy))
            for endpoint, server in endpoints if self.options.profile and spy.is_file() else ():
                if time.monotonic() > self.until:
                    break
                found = profiles.record(spy, endpoint, server, texts, target)
                phase.check(f"py-spy saw {endpoint.name}", bool(found))
                phase.add("profiles", {"endpoint": endpoint.name, "gil": found})

    def theirs(self, name: str, model: Path, *, rust: bool) -> list[tuple[Endpoint, Server]]:
        """vLLM's own server with one of its front ends; in a rehearsal a second one of ours."""
        told = "vllm serve, Rust" if rust else "vllm serve"
        if self.rehearsal:
            other = self.ours(f"{name}-stand-in", model, END_ID="-1")
            return [(Endpoint(told, other.openai), other)]
        name = f"{name}-{'rust' if rust else 'bare'}"
        server = vllm_serve(name, model, self.logs, self.python, rust=rust, **self.environment)
        return [(Endpoint(told, server.openai), server)]

    @staticmethod
    def endpoints(mine: Ours) -> list[tuple[Endpoint, Server]]:
        return [
            (Predictions("cog", mine.cog), mine),
            (Endpoint("/v1", mine.openai), mine),
            (TritonIds("triton", mine.triton), mine),
        ]

    @staticmethod
    def put_start(phase: Phase, server: Server) -> None:
        phase.put(f"{server.name}: start", {"seconds": server.start_s, **server.start_times()})

    def compare(
        self,
        phase: Phase,
        model: Path,
        endpoints: Sequence[tuple[Endpoint, Server]],
        count: int = 8,
    ) -> None:
        """Check that all say the same, then measure them in turn."""
        said = "".join(
            path.read_text("utf-8", "replace")
            for _, server in endpoints
            if isinstance(server, Ours)
            for path in server.logs()
        )
        phase.check("vLLM hands over engine steps", "by engine steps" not in said)
        told = [endpoint for endpoint, _ in endpoints if not isinstance(endpoint, TritonIds)]
        self.same_texts(phase, model, told, count)
        self.rounds(phase, endpoints, model)

    def ours(self, name: str, engine: Path, **environment: str) -> Ours:
        """Our server of one engine directory."""
        values = {**self.environment, **environment}
        python = None if self.rehearsal or self.options.engine_python is None else self.python
        return ours(name, engine, self.logs, python, **values)

    @property
    def environment(self) -> dict[str, str]:
        shared = {
            "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
            "VLLM_CACHE_ROOT": str(self.root / "vllm-cache"),
            "HF_HUB_OFFLINE": "1",
            **multicast.OFF,
        }
        if self.rehearsal:
            shared["PYTHONPATH"] = str(REPOSITORY / "tests" / "doubles")
        return shared

    def same_texts(
        self,
        phase: Phase,
        model: Path,
        endpoints: Sequence[Endpoint],
        count: int = 8,
        max_tokens: int = 64,
    ) -> None:
        """Check that greedy answers, one at a time, are the same text on all `endpoints`."""
        texts = prompts.make(model, count, bench.INPUT_TOKENS, seed=99)
        found = {endpoint.name: bench.greedy(endpoint, texts, max_tokens) for endpoint in endpoints}
        first, *others = found
        words = sorted(len(set(text.split())) for text in found[first])
        phase.put(f"{first}: greedy", {"different_words": words, "sample": found[first][0][:400]})
        for other in others:
            same = sum(a == b for a, b in zip(found[first], found[other], strict=True))
            name = f"{count} greedy answers of {max_tokens} tokens: {other} as {first}"
            phase.check(name, same == count, (same, found[first][:1], found[other][:1]))

    def rounds(
        self, phase: Phase, endpoints: Sequence[tuple[Endpoint, Server]], model: Path
    ) -> None:
        """Measure all in turn, as many rounds as were asked for and there is time for."""
        texts = prompts.make(model, 2048, bench.INPUT_TOKENS)
        measured = bench.Bench(
            [(endpoint, server.processes) for endpoint, server in endpoints],
            texts,
            phase.add_sample,
        )
        concurrencies = self.options.concurrency
        measured.warm_up(max(concurrencies))
        for number in range(self.options.rounds):
            whole = measured.round(number, concurrencies, self.until)
            rows = phase.samples
            phase.put("medians", bench.medians(rows))
            phase.put("token_costs", bench.token_cost_by_process(rows))
            if not whole:
                print("  no time is left for more", flush=True)
                break
        seen = {(row["endpoint"], row["concurrency"]) for row in rows}
        left = {
            (endpoint.name, number)
            for endpoint, _ in endpoints
            for number in concurrencies
            if number <= endpoint.at_most
        } - seen
        phase.check("every endpoint was measured", not left, sorted(left))
        wrong = [error for row in rows for error in row["errors"]]
        phase.check("every answer had all of its tokens", not wrong, wrong[:2])


def stop_once(number: int, _: object) -> None:
    """Stop the servers; further signals (`timeout` sends two) are ignored meanwhile."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    print("stopping the servers", flush=True)
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    """Run the phases; 0 if every check held."""
    # Ours is for this process and those that it makes for the load, not for the servers.
    os.environ["PYTHONPATH"] = os.environ.pop("VERIFY_GPU_PYTHONPATH", "")
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, stop_once)
    try:
        return 1 if Driver(arguments.parse()).run() else 0
    except KeyboardInterrupt as stopped:
        print(f"stopped by {stopped}; what was seen before is in results.json", file=sys.stderr)
        return 130
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
