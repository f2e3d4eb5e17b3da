"""Double of vllm/v1/engine/core_client.py: the way to one engine, or to several."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from tokenizers import Tokenizer

from vllm.compilation.decorators import compile_engine
from vllm.plugins import load_general_plugins
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, PauseMode
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.pooling import Pooled
from vllm.v1.engine.repeating import Sequence
from vllm.v1.engine.utils import launch_core_engines


class EngineCoreClient:
    @staticmethod
    def make_async_mp_client(vllm_config: Any) -> AsyncMPClient:
        return AsyncMPClient(vllm_config)


class AsyncMPClient(EngineCoreClient):
    """Of one engine, or of several with data parallelism: a request goes to the emptiest."""

    def __init__(self, vllm_config: Any) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.outputs_queue: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        model = Path(vllm_config.model_config.model)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._eos = json.loads((model / "config.json").read_text())["eos_token_id"]
        self._max_model_len = vllm_config.model_config.max_model_len
        self._v2 = vllm_config.use_v2_model_runner
        self._model_config = vllm_config.model_config
        self._asleep = False
        load_general_plugins()  # as EngineCore does before it compiles
        compile_engine(vllm_config)
        count = vllm_config.parallel_config.data_parallel_size
        self._engines = [
            EngineCore(n, vllm_config, self.resources, self.outputs_queue) for n in range(count)
        ]
        self._manager = launch_core_engines(vllm_config, count)
        self._loop = asyncio.get_running_loop()  # in vLLM a thread watches them
        for process in self._manager.processes:
            self._loop.add_reader(process.sentinel, self.die)

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self.outputs_queue.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        await asyncio.sleep(0)  # a message to EngineCore
        if self._model_config.runner_type == "generate":
            return ("generate",)
        return ("classify",) if self._model_config.convert == "classify" else ("embed", "plugin")

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        engine = min(self._engines, key=lambda engine: len(engine.live))
        req, _ = engine.preprocess_add_request(request)
        if request.pooling_params is not None:
            engine.add(req, Pooled(request, self._model_config.embedding_size))
            await asyncio.sleep(0)
            return
        if self._v2 and not _fits(request.sampling_params):
            self.die()
            return
        child, _, _ = request.request_id.rpartition("_")
        room = self._max_model_len - len(request.prompt_token_ids)
        if not self._v2:  # whose workers get the prompt alone
            req.output_token_ids.clear()
        manager = engine.structured_output_manager
        sequence = Sequence(int(child or 0), req, self.tokenizer, self._eos, room, manager)
        engine.add(req, sequence)
        await asyncio.sleep(0)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            for engine in self._engines:
                for request_id in request_ids:
                    engine.live.pop(request_id, None)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        try:
            return getattr(self._engines[0], method)(*args)
        except Exception as error:  # noqa: BLE001 - as vLLM does
            raise Exception(f"Call to {method} method failed: {error}") from None

    async def sleep_async(self, level: int = 1, mode: PauseMode = "abort") -> None:
        self._check_alive()
        if mode not in get_args(PauseMode):
            raise ValueError(f"Invalid pause mode: {mode}")
        for engine in self._engines:
            engine.pause(abort=mode == "abort")
        self._asleep = self._asleep or level >= 1

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        self._check_alive()
        self._asleep = False
        for engine in self._engines:
            engine.resume()
        return True

    async def is_sleeping_async(self) -> bool:
        return self._asleep or any(engine.paused for engine in self._engines)

    def _check_alive(self) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError

    def die(self) -> None:
        for process in self._manager.processes:
            self._loop.remove_reader(process.sentinel)
            process.kill()
        self.resources.engine_dead = True
        self.outputs_queue.put_nowait(EngineDeadError())

    def shutdown(self, timeout: float | None = None) -> None:
        for engine in self._engines:
            engine.live.clear()
        for process in self._manager.processes:
            self._loop.remove_reader(process.sentinel)
        self._manager.shutdown(timeout)


def _fits(params: Any) -> bool:
    """Whether model runner V2 has room for what a request asks of its sampler."""
    words = params._bad_words_token_ids or []
    return (
        len(words) <= 128
        and sum(map(len, words)) <= 1024
        and max(len(params.allowed_token_ids or ()), len(params.logit_bias or ())) <= 1024
        and (not params.min_tokens or len(params.stop_token_ids) <= 127)
    )
