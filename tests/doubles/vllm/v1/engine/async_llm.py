"""Double of vllm/v1/engine/async_llm.py: an engine whose model repeats the prompt."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    QueueOverflowError,
    VLLMClientError,
    VLLMValidationError,
)
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest, PauseMode
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.loggers import IterationStats

CLIENT_ERRORS = (VLLMClientError, GracefulHTTPError, GenerationError)

KILL, BREAK = "kill the engine", "break the request"


class AsyncLLM:
    def __init__(self, vllm_config: Any, stat_loggers: Any, log_stats: bool) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.log_stats = log_stats
        self.engine_core = EngineCoreClient.make_async_mp_client(vllm_config)
        self._tokenizer = self.engine_core.tokenizer
        self.renderer = BaseRenderer(vllm_config, self._tokenizer)
        self.output_processor = OutputProcessor(self._tokenizer, log_stats=log_stats)
        engines = range(vllm_config.parallel_config.data_parallel_size)
        self._loggers = [[make(vllm_config, n) for make in stat_loggers or []] for n in engines]
        self.output_handler: asyncio.Task[None] | None = None
        self._run_output_handler()
        arguments = vllm_config.engine_args
        given = {f.name: getattr(arguments, f.name) for f in fields(arguments)}
        if envs.VLLM_BATCH_INVARIANT:
            self._write("batch_invariant")
        self._write("open", {k: v for k, v in given.items() if v is not None})

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: Any,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[Any] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
        client_addresses: dict[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> AsyncLLM:
        return cls(vllm_config, stat_loggers, log_stats=not disable_log_stats)

    def shutdown(self, timeout: float | None = None) -> None:
        self._write("shutdown")
        self.engine_core.shutdown(timeout=timeout)
        if self.output_handler is not None:
            self.output_handler.cancel()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        if not hasattr(self, "_supported_tasks"):
            self._supported_tasks = await self.engine_core.get_supported_tasks_async()
        return self._supported_tasks

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        kv_hints: Any = None,
    ) -> RequestOutputCollector:
        written = {f.name: getattr(params, f.name) for f in fields(params)}
        del written["output_kind"]
        lora = lora_request and lora_request.lora_name
        call = {"id": request_id, "params": written, "lora": lora, "priority": priority}
        self._write("add_request", call)
        if self.errored:
            raise EngineDeadError
        tasks = await self.get_supported_tasks()
        self._validate_params(params, tasks)
        if "type" not in prompt:  # which vLLM encodes on another thread
            ids = (await asyncio.to_thread(self._tokenizer.encode, prompt["prompt"])).ids
            self._check_length(len(ids))
            prompt = {**prompt, "prompt_token_ids": ids}
        request = self._process_inputs(request_id, prompt, params)
        text = prompt.get("prompt")
        self._run_output_handler()
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        self._check_admission(1 if request.pooling_params else params.n)
        if request.pooling_params or params.n == 1:
            await self._add_request(request, text, None, 0, queue)
            return queue
        parent = ParentRequest(request)
        children = [copy(request) for _ in range(params.n)]
        for index, child in enumerate(children):
            child.request_id, child.sampling_params = parent.get_child_info(index)
        for index, child in enumerate(children):
            await self._add_request(child, text, parent, index, queue)
        return queue

    async def _add_request(
        self, request: EngineCoreRequest, prompt: str | None, parent_req: ParentRequest | None,
        index: int, queue: RequestOutputCollector,
    ) -> None:  # fmt: skip
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        await self.engine_core.add_request_async(request)

    def _validate_params(self, params: Any, supported_tasks: tuple[str, ...]) -> None:
        """In vLLM a method of InputProcessor."""
        if not isinstance(params, PoolingParams):
            if "generate" not in supported_tasks:
                raise VLLMValidationError("This model does not support generation")
            for token in params.logit_bias or ():  # a TypeError for text, as in vLLM
                if not 0 <= token < self._tokenizer.get_vocab_size():
                    raise VLLMValidationError(f"token_id(s) {token} in logit_bias is out of range")
            return
        if supported_tasks == ("generate",):
            raise VLLMValidationError("This model does not support pooling")
        if params.task not in supported_tasks:
            raise VLLMValidationError(
                f"Unsupported task: {params.task!r} Supported tasks: {supported_tasks}"
            )
        params.verify(self.model_config)

    def _check_length(self, length: int) -> None:
        """In vLLM a method of its renderer."""
        if length > (most := self.model_config.max_model_len):
            raise VLLMValidationError(
                f"This model's maximum context length is {most} tokens. However, your prompt"
                f" contains at least {length} input tokens"
            )

    def _check_admission(self, n: int) -> None:
        limits, processor = self.vllm_config.scheduler_config, self.output_processor
        most = limits.max_num_queued_reqs
        if most is not None and processor.get_num_unfinished_requests() + n > most:
            raise QueueOverflowError

    def _process_inputs(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams
    ) -> EngineCoreRequest:
        """In vLLM a method of InputProcessor."""
        ids = prompt.get("prompt_token_ids") or self._tokenizer.encode(prompt["prompt"]).ids
        of_pooling = isinstance(params, PoolingParams)
        if len(ids) - of_pooling >= self.model_config.max_model_len:
            raise VLLMValidationError(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length"
                f" of {self.model_config.max_model_len}."
            )
        text = self._tokenizer.decode(ids)
        if BREAK in text:
            raise RuntimeError("CUDA error: it broke")
        if KILL in text:
            self.engine_core.die()
        internal = f"{request_id}-{secrets.token_hex(4)}"
        sampling, pooling = (None, copy(params)) if of_pooling else (copy(params), None)
        return EngineCoreRequest(
            internal,
            ids,
            sampling,
            time.time(),
            external_req_id=request_id,
            pooling_params=pooling,
        )

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        q: RequestOutputCollector | None = None
        try:
            q = await self.add_request(
                request_id, prompt, sampling_params, lora_request=lora_request, priority=priority
            )
            finished = False
            while not finished:
                out = q.get_nowait() or await q.get()
                finished = out.finished
                yield out
        except (asyncio.CancelledError, GeneratorExit):
            if q is not None:
                await self.abort(q.request_id, internal=True)
            raise
        except (EngineDeadError, *CLIENT_ERRORS):
            raise
        except Exception as e:
            if q is not None:
                await self.abort(q.request_id, internal=True)
            raise EngineGenerateError from e
        finally:
            if q is not None:
                q.close()

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        q: RequestOutputCollector | None = None
        try:
            q = await self.add_request(
                request_id, prompt, pooling_params, lora_request=lora_request
            )
            finished = False
            while not finished:
                out = q.get_nowait() or await q.get()
                assert isinstance(out, PoolingRequestOutput)
                finished = out.finished
                yield out
        except asyncio.CancelledError:
            if q is not None:
                await self.abort(q.request_id, internal=True)
            raise
        except (EngineDeadError, *CLIENT_ERRORS):
            raise
        except Exception as e:
            if q is not None:
                await self.abort(q.request_id, internal=True)
            raise EngineGenerateError from e
        finally:
            if q is not None:
                q.close()

    def _run_output_handler(self) -> None:
        if self.output_handler is not None:
            return
        engine_core, output_processor = self.engine_core, self.output_processor
        loggers, log_stats = self._loggers, self.log_stats
        chunk_size = envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE

        async def output_handler() -> None:
            try:
                while True:
                    outputs = await engine_core.get_output_async()
                    num_outputs = len(outputs.outputs)
                    iteration_stats = IterationStats() if log_stats and num_outputs else None
                    for start in range(0, num_outputs, chunk_size):
                        end = start + chunk_size
                        processed = output_processor.process_outputs(
                            outputs.outputs[start:end], outputs.timestamp, iteration_stats
                        )
                        if end < num_outputs:
                            await asyncio.sleep(0)
                        if processed.reqs_to_abort:
                            await engine_core.abort_requests_async(processed.reqs_to_abort)
                    if hasattr(output_processor, "update_scheduler_stats"):
                        output_processor.update_scheduler_stats(outputs.scheduler_stats)
                    for logger in loggers[outputs.engine_index]:
                        logger.record(
                            scheduler_stats=outputs.scheduler_stats,
                            iteration_stats=iteration_stats,
                            engine_idx=outputs.engine_index,
                        )
            except Exception as e:  # noqa: BLE001 - as vLLM does
                output_processor.propagate_error(e)

        self.output_handler = asyncio.create_task(output_handler())

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self._write("abort", {"ids": names, "internal": internal})
        aborted = self.output_processor.abort_requests(names, internal)
        await self.engine_core.abort_requests_async(aborted)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        self._write("sleep", {"level": level, "mode": mode})
        await self.engine_core.sleep_async(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> bool | None:
        self._write("wake_up", {"tags": tags})
        return await self.engine_core.wake_up_async(tags)

    async def is_sleeping(self) -> bool:
        return await self.engine_core.is_sleeping_async()

    async def add_lora(self, lora_request: Any) -> bool:
        """In vLLM a call of each worker, which reads the adapter's files."""
        path = Path(lora_request.lora_path)
        self._write("add_lora", {"lora": vars(lora_request)})
        held = sorted(file.name for file in path.iterdir()) if path.is_dir() else []
        if held != ["adapter_config.json", "adapter_model.safetensors"]:
            raise Exception(f"Call to add_lora method failed: No adapter found for {path}")
        if json.loads((path / held[0]).read_text())["r"] == 13:
            raise Exception("Call to add_lora method failed: LoRA rank 13 is odd")
        return True

    async def check_health(self) -> None:
        if self.errored:
            raise EngineDeadError

    @property
    def errored(self) -> bool:
        death = os.environ.get("VLLM_DOUBLE_DEATH")
        if death and Path(death).exists() and not self.engine_core.resources.engine_dead:
            Path(death).unlink()
            self.engine_core.die()
        return self.engine_core.resources.engine_dead or self.output_handler.done()

    def _write(self, call: str, values: dict[str, Any] | None = None) -> None:
        if path := os.environ.get("VLLM_DOUBLE_JOURNAL"):
            with Path(path).open("a") as file:
                file.write(json.dumps({"call": call, **(values or {})}, default=vars) + "\n")
