"""Double of vllm/v1/engine/async_llm.py: an engine whose model repeats the prompt."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.repeating import Sequence
from vllm.v1.metrics.loggers import FinishedRequestStats, IterationStats, SchedulerStats

KILL, BREAK = "kill the engine", "break the request"


class AsyncLLM:
    def __init__(self, vllm_config: Any, stat_loggers: Any, log_stats: bool) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        model = Path(self.model_config.model)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._eos = json.loads((model / "config.json").read_text())["eos_token_id"]
        self._loggers = [make(vllm_config, 0) for make in stat_loggers or []]
        self._delay = float(os.environ.get("VLLM_DOUBLE_DELAY", "0.001"))
        self._dead = False
        self._live: dict[str, asyncio.Event] = {}
        arguments = vllm_config.engine_args
        given = {f.name: getattr(arguments, f.name) for f in fields(arguments)}
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
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        params = {
            field.name: getattr(sampling_params, field.name)
            for field in fields(sampling_params)
            if field.name != "output_kind"
        }
        lora = lora_request and lora_request.lora_name
        self._write("generate", {"id": request_id, "params": params, "lora": lora})
        if self.errored:
            raise EngineDeadError
        ids = prompt.get("prompt_token_ids") or self._tokenizer.encode(prompt["prompt"]).ids
        if len(ids) >= self.model_config.max_model_len:
            raise ValueError(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length"
                f" of {self.model_config.max_model_len}."
            )
        text = self._tokenizer.decode(ids)
        if BREAK in text:
            raise EngineGenerateError from RuntimeError("CUDA error: it broke")
        self._dead |= KILL in text
        self._live[request_id] = asyncio.Event()
        try:
            async for output in self._outputs(prompt, ids, sampling_params, request_id):
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            await self.abort(request_id, internal=True)
            raise
        finally:
            self._live.pop(request_id, None)

    async def _outputs(
        self, prompt: Any, ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        started = last = time.time()
        room = self.model_config.max_model_len - len(ids)
        sequences = [
            Sequence(index, ids, params, self._tokenizer, self._eos, room)
            for index in range(params.n)
        ]
        finished = False
        while not finished:
            await asyncio.sleep(self._delay)
            if self.errored:
                raise EngineDeadError
            aborted = self._live[request_id].is_set()
            completions = [s.step(aborted) for s in sequences if s.finish_reason is None]
            finished = all(sequence.finish_reason for sequence in sequences)
            now = time.time()
            self._record(sequences, started, last, now, finished)
            last = now
            if params.output_kind == RequestOutputKind.FINAL_ONLY:
                if not finished:
                    continue
                completions = [sequence.whole() for sequence in sequences]
            yield RequestOutput(request_id, prompt.get("prompt"), ids, None, completions, finished)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self._write("abort", {"ids": names, "internal": internal})
        for name in names:
            if name in self._live:
                self._live[name].set()

    async def check_health(self) -> None:
        if self.errored:
            raise EngineDeadError

    @property
    def errored(self) -> bool:
        death = os.environ.get("VLLM_DOUBLE_DEATH")
        return self._dead or bool(death and Path(death).exists())

    def _record(
        self, sequences: list[Sequence], started: float, last: float, now: float, finished: bool
    ) -> None:
        stats = IterationStats(num_generation_tokens=len(sequences))
        if last == started:
            stats.num_prompt_tokens = len(sequences[0].prompt)
            stats.time_to_first_tokens_iter.append(now - started)
        else:
            stats.inter_token_latencies_iter.append(now - last)
        if finished:
            lengths = len(sequences[0].prompt), len(sequences[0].tokens)
            stats.finished_requests.append(FinishedRequestStats(now - started, *lengths))
            stats.n_params_iter.append(len(sequences))
        running = len(self._live) - finished
        levels = SchedulerStats(num_running_reqs=running, kv_cache_usage=running / 1024)
        for logger in self._loggers:
            logger.record(scheduler_stats=levels, iteration_stats=stats)

    def _write(self, call: str, values: dict[str, Any] | None = None) -> None:
        if path := os.environ.get("VLLM_DOUBLE_JOURNAL"):
            with Path(path).open("a") as file:
                file.write(json.dumps({"call": call, **(values or {})}, default=vars) + "\n")
