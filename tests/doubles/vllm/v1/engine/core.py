"""Double of vllm/v1/engine/core.py: an engine that steps all its sequences together.

Its process is one as EngineCore's is, but for what is computed: it reads its model and is ready;
what it would compute, `core_client` does. As vLLM's, it does not notice the death of its host.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.pooling import Pooled
from vllm.v1.engine.repeating import Sequence
from vllm.v1.executor.multiproc_executor import RemoteWorkers
from vllm.v1.metrics.loggers import PrefixCacheStats, SchedulerStats
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


class EngineCore:
    """In vLLM a process of its own."""

    def __init__(
        self,
        index: int,
        vllm_config: Any,
        resources: SimpleNamespace,
        queue: asyncio.Queue[EngineCoreOutputs | Exception],
    ) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config
        self.structured_output_manager = StructuredOutputManager(vllm_config)
        self.live: dict[str, Sequence | Pooled] = {}
        self._index, self._resources, self._queue = index, resources, queue
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._delay = float(os.environ.get("VLLM_DOUBLE_DELAY", "0.001"))
        self._shape_s = float(os.environ.get("VLLM_DOUBLE_SHAPE", "0"))
        hold = os.environ.get("VLLM_DOUBLE_HOLD")
        self._hold = Path(hold) if hold else None
        self._prefix = PrefixCacheStats()
        self._cached: set[tuple[int, ...]] = set()
        self._stepping: asyncio.Task[None] | None = None
        self._workers = RemoteWorkers(vllm_config.parallel_config)
        self.paused = False

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        req = Request.from_engine_core_request(request, None)
        if req.use_structured_output:
            self.structured_output_manager.grammar_init(req)
        return req, 0

    def pause(self, *, abort: bool) -> None:
        """Step no more; requests that are running end as aborted, or wait, as new ones do."""
        self.paused = True
        if abort and self.live:
            ended = [EngineCoreOutput(name, [], None, FinishReason.ABORT) for name in self.live]
            self.live.clear()
            self._queue.put_nowait(EngineCoreOutputs(self._index, ended, SchedulerStats()))

    def resume(self) -> None:
        """Step again."""
        self.paused = False
        self._go_on()

    def add(self, request: Request, sequence: Sequence | Pooled) -> None:
        self._look_up(request)
        self.live[request.request_id] = sequence
        self._go_on()

    def _go_on(self) -> None:
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())

    def _look_up(self, request: Request) -> None:
        """Count the whole blocks that earlier requests began with.

        As in vLLM, those of a request that was not preempted must be of its prompt.
        """
        ids, hits = request.all_token_ids, 0
        self._prefix.queries += len(ids)
        for end in range(16, len(ids) + 1, 16):
            if (block := tuple(ids[:end])) in self._cached:
                hits += 16
            self._cached.add(block)
        self._prefix.hits += hits
        request.num_cached_tokens = min(hits, len(ids) - 1)
        if request.prefill_stats and request.num_preemptions <= 0:
            assert hits <= len(request.prompt_token_ids)

    async def _step(self) -> None:
        while self.live and not self.paused:
            await asyncio.sleep(self._delay)
            await self._workers.step()
            if self._hold and self._hold.exists():
                continue
            if self._resources.engine_dead:
                return
            if self._shape_s and len(self.live) > 1:
                compiled, self._shape_s = time.monotonic() + self._shape_s, 0.0
                while time.monotonic() < compiled:
                    await asyncio.sleep(0)  # computes, but the host is another process in vLLM
            running = [one for one in self.live.values() if one.is_ready()]
            outputs = [sequence.step() for sequence in running[: self._max_num_seqs]]
            for output in outputs:
                if output.finished:
                    del self.live[output.request_id]
            count = sum(not output.finished for output in outputs)
            waiting = len(self.live) - count
            prefix, self._prefix = self._prefix, PrefixCacheStats()
            stats = SchedulerStats(count, waiting, 0, count / 1024, prefix)
            made = EngineCoreOutputs(self._index, outputs, stats)
            self._queue.put_nowait(made)


class EngineCoreProc:
    """The process; in vLLM it is an EngineCore, too."""

    @staticmethod
    def run_engine_core(
        *args: Any, dp_rank: int = 0, local_dp_rank: int = 0, **kwargs: Any
    ) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
        if path := os.environ.get("VLLM_DOUBLE_JOURNAL"):
            told = {"call": "engine_core", "pid": os.getpid(), "environment": dict(os.environ)}
            with Path(path).open("a") as file:
                file.write(json.dumps(told) + "\n")
        vocabulary = kwargs["vllm_config"].model_config.get_vocab_size()
        with socket.socket(socket.AF_UNIX) as host:
            host.connect(kwargs["handshake_address"])
            host.sendall(b"READY" if vocabulary else b"")
        while True:
            signal.pause()
