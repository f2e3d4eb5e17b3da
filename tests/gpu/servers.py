"""Server processes of one engine directory: ``cog-triton serve`` and ``vllm serve``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from arguments import REPOSITORY
from processes import process_tree

from cog_triton.system.ports import free_ports

START_TIMEOUT_S = 400
_STOP_S = 40
# What vLLM's log tells of its start, by the name that results have for it.
_SAID = {
    "weights_s": r"Loading weights took ([\d.]+) seconds",
    "model_s": r"Model loading took .*? ([\d.]+) seconds",
    "compile_s": r"compilation: ([\d.]+) s",
    "graphs_s": r"Graph capturing finished in (\d+) secs",
    "engine_s": r"init engine .*?took ([\d.]+) s",
    "kv_cache_tokens": r"GPU KV cache size: ([\d,]+) tokens",
    "attention": r"Using (\w+) (?:attention )?backend",
    "all_reduce": r"Using (\[[^]]*\]) all-reduce backends .* for group 'tp",
}

_LOG = re.compile(r"(triton.*|engine-\d+)\.log")


class NotStarted(Exception):
    """A server that ended, or took too long; says the last lines of its log."""


@dataclass
class Server:
    """A running server; `log` is a file, and `health` answers 200 with `says` once it is ready."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    health: str
    says: bytes = b""
    began: float = 0.0
    start_s: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    cores: Collection[int] = ()
    """Processor cores that it may use; all, if none are said."""

    def launch(self) -> None:
        """Start the process; `wait` returns once it answers."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        with self.log.open("wb") as log, on_cores(self.cores):
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def healthy(self) -> bool:
        """Whether it is ready; raises `NotStarted` where it says that it never will be."""
        try:
            answer = httpx.get(self.health, timeout=10)
        except httpx.TransportError:
            return False
        if b'"SETUP_FAILED"' in answer.content:
            raise NotStarted(f"{self.name} did not start; {self.log} ends:\n{self.tail()}")
        return answer.status_code == 200 and self.says in answer.content

    def wait(self) -> None:
        """Wait until it is ready; raises `NotStarted`."""
        assert self.process is not None
        while not self.healthy():
            late = time.monotonic() - self.began > START_TIMEOUT_S
            if late or self.process.poll() is not None:
                raise NotStarted(f"{self.name} did not start; {self.log} ends:\n{self.tail()}")
            time.sleep(0.1)
        self.start_s = round(time.monotonic() - self.began, 1)
        print(f"{self.name}: ready after {self.start_s} s  {self.start_times()}", flush=True)

    def tail(self, size: int = 4000) -> str:
        """The last `size` characters of its logs."""
        return "\n".join(path.read_text("utf-8", "replace")[-size:] for path in self.logs())

    def logs(self) -> list[Path]:
        """Its log, and those of its Triton and its engines."""
        found = self.log.parent.glob("work/**/*.log")
        return [self.log, *sorted(path for path in found if _LOG.match(path.name))]

    def start_times(self) -> dict[str, str]:
        """Start-up times that vLLM's log reports."""
        text = "\n".join(path.read_text("utf-8", "replace") for path in self.logs())
        found = {name: re.findall(pattern, text) for name, pattern in _SAID.items()}
        return {name: hits[0] for name, hits in found.items() if hits}

    def processes(self) -> dict[int, str]:
        """Role of each of its processes, by process id."""
        assert self.process is not None
        return process_tree(self.process.pid)

    def stop(self) -> None:
        """Stop the process and all that it started."""
        if self.process is None:
            return
        left = self.processes()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in left:  # vLLM leaves its engine's process when it is stopped early
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


@dataclass
class Ours(Server):
    """``cog-triton serve``."""

    cog: int = 0
    openai: int = 0
    triton: int = 0
    metrics: int = 0


@dataclass
class VLLMServe(Server):
    """``vllm serve``."""

    openai: int = 0


def ours(
    name: str,
    engine: Path,
    work: Path,
    engine_python: Path | None,
    *,
    deterministic: bool = False,
    **environment: str,
) -> Ours:
    """Our server of an engine directory, vLLM in `engine_python`, if that is not Triton's own."""
    work = work / name
    work.mkdir(parents=True, exist_ok=True)
    models: dict[str, Any] = {}
    given = {"engine_python": str(engine_python)} if engine_python else {}
    given |= {"deterministic": "true"} if deterministic else {}
    if given:
        models["tensorrt_llm"] = {"args": given}
    (work / "serve.yaml").write_text(json.dumps(models))
    cog, openai, triton, grpc, measures = free_ports(5)
    return Ours(
        name,
        [sys.executable, "-m", "cog_triton", "serve", str(engine)],
        {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(REPOSITORY), environment.pop("PYTHONPATH", "")])
            ),
            "PORT": str(cog),
            "OPENAI_PORT": str(openai),
            "TRITON_HTTP_PORT": str(triton),
            "TRITON_GRPC_PORT": str(grpc),
            "TRITON_METRICS_PORT": str(measures),
            "COG_TRITON_WORK_DIR": str(work / "work"),
            "COG_TRITON_CONFIG": str(work / "serve.yaml"),
            "TRITON_START_TIMEOUT": str(START_TIMEOUT_S),
            "SERVED_MODEL_NAME": "verify",
            "RESUME": "0",  # a death is to be heard, and the return to be timed
            **environment,
        },
        work / "serve.log",
        f"http://127.0.0.1:{cog}/health-check",
        b'"READY"',
        cog=cog,
        openai=openai,
        triton=triton,
        metrics=measures,
    )


def vllm_serve(
    name: str, engine: Path, work: Path, python: Path, *, rust: bool = False, **environment: str
) -> VLLMServe:
    """vLLM's own server of the same directory, with the arguments in its ``model.json``."""
    (port,) = free_ports(1)
    command = [str(python), "-m", *vllm_words(engine, port, rust=rust)]
    environment |= {"VLLM_USE_RUST_FRONTEND": "1"} if rust else {}
    log = work / name / "serve.log"
    health = f"http://127.0.0.1:{port}/health"
    environment = {"VLLM_NO_USAGE_STATS": "1", **environment}
    return VLLMServe(name, command, environment, log, health, openai=port)


def vllm_words(engine: Path, port: int, *, rust: bool) -> list[str]:
    """The module of vLLM's server, by its front end, and its options."""
    options = vllm_options(engine, port)
    if rust:
        return ["vllm.entrypoints.cli.main", "serve", str(engine), *options]
    return ["vllm.entrypoints.openai.api_server", f"--model={engine}", *options]


def vllm_options(engine: Path, port: int) -> list[str]:
    """Options of vLLM's server: a port of this machine alone, and what ``model.json`` says."""
    options = ["--host=127.0.0.1", f"--port={port}", "--served-model-name=verify"]
    for argument, value in json.loads((engine / "model.json").read_text("utf-8")).items():
        option = argument.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        else:
            shown = json.dumps(value) if isinstance(value, dict | list) else str(value)
            options.append(f"--{option}={shown}")
    return options


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Keep this thread, and all that it starts meanwhile, on `cores`; on any, if none are said."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def shared_cores() -> tuple[set[int], set[int]]:
    """The cores for servers, and for the load: an eighth, at least 4, where there are 16."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 16:
        return set(), set()
    least = len(cores) - max(4, len(cores) // 8)
    return set(cores[:least]), set(cores[least:])


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start all servers at once; stop them at the end."""
    with stopped_at_the_end(*servers):
        for server in servers:
            server.launch()
        for server in servers:
            server.wait()
        yield


@contextmanager
def stopped_at_the_end(*servers: Server) -> Iterator[None]:
    """Stop all servers at the end, those that were launched."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        yield
