"""One engine process of ours without Triton, and what the driver and the machine say of it."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from cog_triton.engines.engine_link import EngineLink
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import CogTritonError
from cog_triton.ipc.streams import Server, Stream
from cog_triton.keeper.checkpoint_process import CheckpointProcess
from cog_triton.keeper.keeper_messages import PARKABLE, Attach, EngineSpec
from cog_triton.keeper.kept_engine import EngineState, KeptEngine
from cog_triton.text.sampling import SamplingParams

HOST = "cog_triton.engines.vllm.engine_host:VLLMHost"


@asynccontextmanager
async def lone_engine(
    engine_dir: Path, python: Path | None, logs: Path, load_s: float
) -> AsyncIterator[KeptEngine]:
    """A kept engine that can be parked, once it is ready; raises RuntimeError after `load_s`."""
    logs.mkdir(parents=True, exist_ok=True)
    name = f"cog-triton-lone-{secrets.token_hex(8)}"
    parameters = {"engine_dir": str(engine_dir), PARKABLE: "true"}
    parameters |= {"engine_python": str(python)} if python else {}
    started: list[KeptEngine] = []

    async def accept(stream: Stream) -> None:
        attach = await stream.receive()
        assert isinstance(attach, Attach)
        await started[0].attached(attach.pid, stream)

    server = Server(name, accept)
    engine = KeptEngine(1, EngineSpec.of(HOST, parameters), name, logs)
    started.append(engine)
    try:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(engine.wait_until_loaded(), load_s)
        if engine.state is not EngineState.READY:
            raise RuntimeError(f"{engine.state.value} after {load_s:.0f} s: {engine.load_error()}")
        yield engine
    finally:
        engine.kill("it is not needed any more")  # one that is parked cannot end by itself
        await engine.clean_up()
        server.close()


class Tokens:
    """Greedy tokens of prompts, by one connection to a lone engine."""

    def __init__(self, engine: KeptEngine, prompts: Sequence[Sequence[int]], count: int) -> None:
        self._client = EngineLink(
            engine.address, "tokens", on_end=lambda: None, on_kv_cache=lambda stats: None
        )
        self._client.start()
        self._prompts = prompts
        self._count = count

    async def ask(self, timeout_s: float) -> tuple[list[list[int]], float]:
        """Tokens for each prompt, all at once, and seconds until the first; TimeoutError."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        sampling = SamplingParams(max_tokens=self._count)
        began, first = time.monotonic(), 0.0
        for number, prompt in enumerate(self._prompts):
            request = EngineRequest(input_ids=list(prompt), sampling=sampling, streaming=True)

            def emit(event: Any, number: int = number) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (number, event))

            self._client.submit(number + 1, request, emit)
        found: list[list[int]] = [[] for _ in self._prompts]
        left = len(found)
        while left:
            until = began + timeout_s - time.monotonic()
            number, event = await asyncio.wait_for(events.get(), max(0.1, until))
            if event.error is not None:
                raise event.error
            first = first or time.monotonic() - began
            found[number].extend(event.token_ids)
            left -= event.finish is not None
        return found, first

    def close(self) -> None:
        """Hang up."""
        self._client.close()


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for what is started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def cuda_states(pids: Sequence[int]) -> dict[int, str] | str:
    """State of CUDA of those processes that have it, or why that cannot be told."""
    try:
        with closing(CheckpointProcess()) as checkpoints:
            return {pid: state.name for pid, state in checkpoints.states(pids).items()}
    except CogTritonError as error:
        return str(error)


def gpu_memory() -> dict[str, str]:
    """Memory used of each GPU, and by each process on it, as nvidia-smi tells."""
    return {
        "gpus": said("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"),
        "processes": said(
            "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"
        ),
    }


def said(*command: str) -> str:
    """What a program says in a minute at most, in one line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return " ".join((done.stdout or done.stderr).split())
