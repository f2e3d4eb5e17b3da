"""vLLM host process: runs AsyncLLM for the Triton models ``tensorrt_llm`` and ``vllm_model``."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry
from cog_triton.engines.engine_loop import AsyncEngine
from cog_triton.engines.engine_orders import FallAsleep, SleepChanged, WakeUp
from cog_triton.engines.engine_spec import PARKABLE
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent, check_prompt
from cog_triton.engines.vllm import compiler_caches, engine_api, request_import
from cog_triton.engines.vllm.argument_types import ALLOW_UNTESTED, installed_version
from cog_triton.engines.vllm.core_process import CoreProcess
from cog_triton.engines.vllm.engine_errors import coded_error
from cog_triton.engines.vllm.engine_outputs import (
    Converter,
    EmbeddingConverter,
    TextOutputConverter,
    TokenOutputConverter,
    failed,
)
from cog_triton.engines.vllm.engine_sleep import EngineSleep, parkable, ranks
from cog_triton.engines.vllm.family import DETERMINISTIC, LEADER, REASONING_PARSER
from cog_triton.engines.vllm.host_messages import TextRequest
from cog_triton.engines.vllm.image_decoding import check_images, decode_images, image_error
from cog_triton.engines.vllm.model_directory import VLLMModel, enter_model, read_ahead_files
from cog_triton.engines.vllm.sampling_arguments import LORA_NAME, from_engine_request
from cog_triton.errors import CogTritonError, InvalidArgument, PromptTooLong, VLLMUnknownError
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.system import page_cache
from cog_triton.system.log_format import request_id

_log = logging.getLogger(__name__)
_HEALTH_PERIOD_S = 0.1  # vLLM compares two flags for it


class VLLMHost(AsyncEngine):
    """vLLM host: one engine for every client; run by `cog_triton.backend.engine_process`."""

    def __init__(
        self,
        model: VLLMModel,
        *,
        allow_untested: bool = False,
        registry: AdapterRegistry | None = None,
        core: CoreProcess | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._registry = registry
        self._loras: dict[int, Any] = {}
        self._loading = asyncio.Lock()
        self._rendering = asyncio.Lock()
        self._allow_untested = allow_untested
        self._usage, self._queries, self._hits = 0.0, 0, 0
        self._engine = self.runner.run(self._open(core))
        tasks = engine_api.check_tasks(self._engine, embeds=model.embeds)
        self.runner.run(tasks)
        self.max_batch_size = engine_api.max_num_seqs(self._engine)
        self._limits = engine_api.worker_limits(self._engine)
        self._no_import = self.runner.run(request_import.refusal(self._engine))
        check_images(model, engine_api.image_limit(self._engine))
        self._sleep = EngineSleep(self._engine, model.arguments)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._to_abort: list[str] = []
        self._dead = False
        self._steps: engine_api.StepOutputs | None = None
        try:
            self._steps = engine_api.StepOutputs(self._engine, lambda: self.server.flush())
        except VLLMUnknownError as error:
            _log.warning("%s", error)
        if registry is not None:
            for name in registry.adapters():
                self.runner.run(self._lora(name))

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Load the engine that a rendered model's parameters describe."""
        version = installed_version()
        model = enter_model(Path(parameters["engine_dir"]), version)
        if parameters.get(PARKABLE) == "true":
            model = replace(model, arguments=parkable(model.arguments))
        if name := parameters.get(REASONING_PARSER):
            model = replace(model, arguments={**model.arguments, REASONING_PARSER: name})
        if parameters.get(DETERMINISTIC, "").lower() == "true":  # vLLM reads it when it is imported
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        sealed = None
        if parameters.get(compiler_caches.TRUSTED):
            from cog_triton.engines.vllm.sealed_caches import Trusted  # most engines do without

            sealed = Trusted.of(Path.cwd(), parameters)
            sealed.set_variables()
        caches = compiler_caches.begin(parameters, model.arguments, version)
        seeded = sealed.seed(caches, ranks(model.arguments)) if sealed is not None else None
        core = CoreProcess(model.architectures, ranks=ranks(model.arguments))
        untested = parameters.get(ALLOW_UNTESTED, "").lower() == "true"
        registry = AdapterRegistry(Path(parameters[REGISTRY])) if REGISTRY in parameters else None
        if model.nodes > 1:
            leader = {"master_addr": name} if (name := parameters.get(LEADER)) else {}
            own = {"distributed_executor_backend": "mp", **model.arguments, **leader}
            model = replace(model, arguments=own)
        with page_cache.reading_ahead(read_ahead_files(model.arguments)):
            host = cls(model, allow_untested=untested, registry=registry, core=core)
        try:
            if seeded is not None:
                seeded.check()
        except CogTritonError:
            host.close()
            raise
        return host

    async def _open(self, core: CoreProcess | None) -> Any:
        """Load the engine inside the event loop, which AsyncLLM needs to watch EngineCore."""
        return engine_api.open_engine(
            self.model.arguments, self._record, allow_untested=self._allow_untested, core=core
        )

    def _record(self, usage: float, queries: int, hits: int) -> None:
        """Take the used share after a step, and the tokens that it looked up and found."""
        self._usage = usage
        self._queries += queries
        self._hits += hits

    def kv_cache(self) -> KVCacheStats | None:
        """See `ServedEngine.kv_cache`; None where vLLM does not tell us."""
        if self.model.arguments.get("disable_log_stats"):
            return None
        block_size, blocks = engine_api.kv_cache_blocks(self._engine)
        # After a cancellation vLLM says nothing more until its next step.
        usage = self._usage if self.server.running else 0.0
        return KVCacheStats(usage, block_size, blocks, self._queries, self._hits)

    async def run(self) -> None:
        """See `AsyncEngine.run`: a health check, of an idle engine, too."""
        try:
            while True:
                await self._engine.check_health()
                await asyncio.sleep(_HEALTH_PERIOD_S)
        except Exception as error:
            self._dead = True
            self.server.fail_all(coded_error(error))
            raise
        finally:
            tasks = [*self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def obey(self, order: FallAsleep | WakeUp) -> SleepChanged:
        """See `AsyncEngine.obey`."""
        return await self._sleep.obey(order)

    def close(self) -> None:
        self._engine.shutdown()
        self.runner.close()

    def submit(self, number: int, request: Any) -> None:
        task = self._tasks[number] = self.loop.create_task(self._run(number, request))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    def cancel(self, number: int) -> None:
        """See `ServedEngine.cancel`: it ends at once."""
        self._emit(number, TokenEvent([], [], "cancelled"))
        self._stop(number)  # before the task, which may just be adding it
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    def _emit(self, number: int, event: Any, *, at_once: bool = True) -> None:
        """Emit an event, at the loop's next turn, or with the next `EngineServer.flush`."""
        self.server.emit(number, event)
        if at_once:
            self.loop.call_soon(self.server.flush)

    def _stop(self, number: int) -> None:
        if not self._dead:
            self._to_abort.append(str(number))
            if len(self._to_abort) == 1:  # else the task that takes them has not begun
                task = self.loop.create_task(self._abort())
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def _abort(self) -> None:
        names, self._to_abort = self._to_abort, []
        await self._engine.abort(names)

    async def _run(self, number: int, request: Any) -> None:
        request_id.set(str(number))  # of this task alone
        try:
            await self._start(number, request)
        except Exception as error:  # noqa: BLE001 - the client must get whatever it is
            self._emit(number, failed(coded_error(error)))

    async def _start(self, number: int, request: Any) -> None:
        """Start a request, or make all of it if vLLM does not hand outputs over."""
        if not isinstance(request, EngineRequest):
            await self._start_text(number, request)
        elif request.embeds:
            await self._embed(number, request)
        else:
            await self._start_tokens(number, request)

    async def _start_tokens(self, number: int, request: EngineRequest) -> None:
        # vLLM would cut output short where the contract promises request_output_len tokens.
        check_prompt(request, max_seq_len=self.model.max_model_len)
        if request.made and self._no_import:
            raise InvalidArgument(f"made: {self._no_import}")
        if request.top_log_probs and request.stop_words:
            raise InvalidArgument("top_log_probs: not together with stop_words_list")
        params = engine_api.sampling_params(
            from_engine_request(request),
            stream=request.streaming,
            bad_words=request.bad_words,
        )
        self._limits.check(params, request.bad_words)
        lora = await self._lora(request.adapter)
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.input_ids)}
        if request.images:
            prompt = await self._with_images(
                {"prompt_token_ids": list(request.input_ids)}, request.images
            )
            length = len(prompt["prompt_token_ids"])
            params.max_tokens = min(params.max_tokens, self._room(length))
            params.min_tokens = min(params.min_tokens, params.max_tokens)
            self._emit(number, TokenEvent([], [], of_prompt=True, prompt_length=length))
        name, converter = str(number), TokenOutputConverter(request)
        if self._steps is None:
            outputs = self._engine.generate(
                prompt, params, name, lora_request=lora, priority=request.priority
            )
            await self._iterate(number, converter, outputs)
            return

        def put(output: Any) -> None:
            if self._put(number, converter, output):
                self._stop(number)

        if await self._steps.add_request(name, prompt, params, put, lora, request.priority):
            self.loop.call_soon(self.server.flush)

    async def _start_text(self, number: int, request: TextRequest) -> None:
        values = dict(request.sampling)
        if values.get("logit_bias"):  # whose keys came as JSON has them
            values["logit_bias"] = {int(key): one for key, one in values["logit_bias"].items()}
        lora = await self._lora(values.pop(LORA_NAME, None))
        if request.return_cumulative_logprob and values.get("logprobs") is None:
            values["logprobs"] = 0
        params = engine_api.sampling_params(values, stream=request.stream)
        self._limits.check(params, engine_api.bad_word_tokens(self._engine, params))
        prompt: Any = {"prompt": request.prompt}
        if request.images:
            prompt = await self._with_images(prompt, request.images)
            self._room(len(prompt["prompt_token_ids"]))
        outputs = self._engine.generate(prompt, params, str(number), lora_request=lora)
        await self._iterate(number, TextOutputConverter(request), outputs)

    async def _embed(self, number: int, request: EngineRequest) -> None:
        prompt = {"type": "token", "prompt_token_ids": list(request.input_ids)}
        params = engine_api.pooling_params(request.dimensions)
        lora = await self._lora(request.adapter)
        outputs = self._engine.encode(prompt, params, str(number), lora_request=lora)
        await self._iterate(number, EmbeddingConverter(), outputs)

    async def _iterate(
        self, number: int, converter: Converter, outputs: AsyncGenerator[Any, None]
    ) -> None:
        async with aclosing(outputs):  # leaving it early aborts the request
            async for output in outputs:
                self._put(number, converter, output, at_once=True)
                if not self.server.runs(number):
                    return
        raise VLLMUnknownError("vLLM ended the request without a reason")

    def _put(
        self, number: int, converter: Converter, output: Any, *, at_once: bool = False
    ) -> bool:
        """Emit what a RequestOutput holds, or the exception that ends the request; never raises.

        It leaves at the end of the engine step, or with `at_once` at the loop's next turn, as
        errors and cancellations do: they may come when no step is under way. Returns whether the
        request ended here and goes on in vLLM.
        """
        if not self.server.runs(number):
            return False
        try:
            if isinstance(output, Exception):
                raise output
            if (prompt := converter.prompt_event(output)) is not None:
                self._emit(number, prompt, at_once=at_once)
            event = converter.convert(output)
        except Exception as error:  # noqa: BLE001 - in vLLM's output handler it would end them all
            event = failed(coded_error(error))
        if event is not None:
            at_once |= event.error is not None or event.finish == "cancelled"
            self._emit(number, event, at_once=at_once)
        return not (self.server.runs(number) or isinstance(output, Exception) or output.finished)

    async def _with_images(self, prompt: dict[str, Any], images: Sequence[ImagePart]) -> Any:
        """The prompt with the tokens of its images; those of one request at a time in memory."""
        async with self._rendering:
            load = engine_api.image_loader()
            decoded = await asyncio.to_thread(decode_images, images, load)
            try:
                return await engine_api.render_images(self._engine, prompt, decoded)
            except Exception as error:
                raise image_error(error, images) from error

    def _room(self, length: int) -> int:
        room = self.model.max_model_len - length
        if room < 1:
            raise PromptTooLong(
                f"Prompt length ({length}, images included) exceeds maximum input length"
                f" ({self.model.max_model_len - 1})"
            )
        return room

    async def _lora(self, name: str | None) -> Any:
        if name is None:
            return None
        if self._registry is None:
            raise InvalidArgument(f"{LORA_NAME}={name!r}: LoRA feature is not enabled.")
        known = self._registry.adapters()
        if name not in known:
            raise InvalidArgument(
                f"{LORA_NAME}: LoRA {name} is not supported, we currently support {list(known)}"
            )
        adapter = known[name]
        if adapter.number not in self._loras:
            async with self._loading:  # one waits for another that loads it
                if adapter.number not in self._loras:
                    made = engine_api.lora_request(
                        adapter.engine_name, adapter.number, str(adapter.directory)
                    )
                    await engine_api.add_lora(self._engine, made)
                    self._loras[adapter.number] = made
        return self._loras[adapter.number]
