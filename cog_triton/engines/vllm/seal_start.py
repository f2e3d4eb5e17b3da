"""Start of a vLLM engine for its seal: loaded as it is served, asked once, ended.

    python -m cog_triton.engines.vllm.seal_start PARAMETERS INPUT_IDS TOKENS

in the Python that has vLLM; PARAMETERS and INPUT_IDS are JSON. The last line that it prints is what
came of it, a `Started` as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from cog_triton.artifact.seal import Environment
from cog_triton.engines.engine_server import EngineServer
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.vllm import compiler_caches
from cog_triton.engines.vllm.engine_host import VLLMHost
from cog_triton.engines.vllm.engine_sleep import ranks
from cog_triton.engines.vllm.sealed_caches import compiled, environment_here
from cog_triton.errors import CogTritonError
from cog_triton.text.sampling import SamplingParams


class Started(BaseModel):
    """What a start told: its greedy answer, how long it took, and where it was.

    `driver` is NVIDIA's, None where it is not known; `held` is how many compiled models and kernels
    there were at its end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    output_ids: list[int]
    seconds: float
    environment: Environment
    driver: str | None
    held: int


class _OneRequest:
    """What an `EngineServer` is to its engine, with one request and no peers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ids: list[int] = []
        self.ended: asyncio.Future[None] = loop.create_future()

    @property
    def running(self) -> int:
        return int(not self.ended.done())

    def emit(self, _number: int, event: Any) -> None:
        self.ids += event.token_ids
        if event.error is not None:
            self.ended.set_exception(event.error)
        elif event.finish is not None:
            self.ended.set_result(None)

    def flush(self) -> None:
        """Nobody waits for what would be sent."""

    def runs(self, _number: int) -> bool:
        return not self.ended.done()


def answer(host: VLLMHost, input_ids: list[int], tokens: int) -> list[int]:
    """The greedy answer of `host`; raises the coded error that it has instead."""
    request = _OneRequest(host.loop)
    host.server = cast("EngineServer", request)
    sampling = SamplingParams(max_tokens=tokens)
    host.submit(1, EngineRequest(input_ids=input_ids, sampling=sampling, end_id=-1))
    host.loop.run_until_complete(request.ended)
    return request.ids


def main(parameters: dict[str, str], input_ids: list[int], tokens: int) -> int:
    """Start the engine, ask it, and print a `Started`; 1 with the coded error that ended it."""
    began = time.monotonic()
    os.environ.pop(compiler_caches.ROOT, None)  # a user's caches are not this engine's
    try:
        host = VLLMHost.from_parameters(parameters)
        seconds = time.monotonic() - began
        try:
            ids = answer(host, input_ids, tokens)
        finally:
            host.close()
        environment, driver = environment_here(ranks(host.model.arguments))
        held = sum(map(len, compiled(Path(os.environ[compiler_caches.ROOT]).parent)))
    except CogTritonError as error:
        print(error, flush=True)
        return 1
    told = Started(
        output_ids=ids,
        seconds=round(seconds, 1),
        environment=environment,
        driver=driver.version,
        held=held,
    )
    print("\n" + told.model_dump_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])))
