"""vLLM host process: runs AsyncLLM for the Triton models ``tensorrt_llm`` and ``vllm_model``."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.request_checks import check_prompt
from cog_triton.engines.step_items import OWNER, STEPS
from cog_triton.engines.vllm import engine_api
from cog_triton.engines.vllm.engine_errors import coded_error
from cog_triton.engines.vllm.engine_metrics import KVCacheMonitor, MetricsBuffer
from cog_triton.engines.vllm.engine_outputs import cancelled, failed, prompt_length
from cog_triton.engines.vllm.engine_sleep import EngineSleep, parkable
from cog_triton.engines.vllm.host_connections import Peer, SendOrder, listen
from cog_triton.engines.vllm.host_messages import EmbeddingRequest, MetricsRequest, TextRequest
from cog_triton.engines.vllm.image_decoding import decode_images, image_error
from cog_triton.engines.vllm.image_models import check_images
from cog_triton.engines.vllm.model_directory import VLLMModel, read_model
from cog_triton.engines.vllm.node_link import Hello, LeaderLinks
from cog_triton.engines.vllm.nodes import (
    LEADER,
    fingerprint,
    network_variables,
    node_arguments,
    nodes_of,
)
from cog_triton.engines.vllm.running_request import RunningRequest
from cog_triton.engines.vllm.sampling_arguments import LORA_NAME, from_engine_request
from cog_triton.engines.vllm.vllm_version import ALLOW_UNTESTED, installed_version
from cog_triton.errors import InvalidArgument, PromptTooLong, VLLMUnknownError
from cog_triton.images.image_limits import ImagePart
from cog_triton.ipc.connection import Connection
from cog_triton.ipc.streams import Stream
from cog_triton.keeper.keeper_messages import PARKABLE, FallAsleep, Stop
from cog_triton.system.log_format import request_id

_log = logging.getLogger(__name__)
_HEALTH_PERIOD_S = 0.1  # vLLM compares two flags for it
_STATS_PERIOD_S = 0.1
_IDLE_S = 5.0


class VLLMHost:
    """vLLM host: serves one engine to every peer; run by `cog_triton.backend.engine_process`."""

    def __init__(
        self,
        model: VLLMModel,
        *,
        allow_untested: bool = False,
        registry: AdapterRegistry | None = None,
        links: LeaderLinks | None = None,
    ) -> None:
        self._model = model
        self._links = links
        self._registry = registry
        self._loras: dict[int, Any] = {}
        self._loading = asyncio.Lock()
        self._rendering = asyncio.Lock()
        self._allow_untested = allow_untested
        self._metrics = MetricsBuffer()
        self._kv_cache = KVCacheMonitor()
        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(self._open())
        tasks = engine_api.check_tasks(self._engine, embeds=model.embeds)
        self._loop.run_until_complete(tasks)
        self._limits = engine_api.worker_limits(self._engine)
        check_images(model, engine_api.image_limit(self._engine))
        self._peer_numbers = itertools.count(1)
        self._running: dict[int, dict[int, RunningRequest]] = {}  # by peer and handle
        self._serving: set[asyncio.Task[None]] = set()
        self._owners: dict[Peer, KVCacheStats | None] = {}  # with what each was told
        self._aborts: set[asyncio.Task[None]] = set()
        self._order = SendOrder()
        self._death: Exception | None = None
        self._steps: engine_api.StepOutputs | None = None
        try:
            self._steps = engine_api.StepOutputs(self._engine, self._order.flush)
        except VLLMUnknownError as error:
            _log.warning("%s", error)
        if registry is not None:
            for name in registry.adapters():
                self._loop.run_until_complete(self._lora(name))

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Load the engine that a rendered model's parameters describe."""
        model = read_model(Path(parameters["engine_dir"]), installed_version())
        if parameters.get(PARKABLE) == "true":
            model = replace(model, arguments=parkable(model.arguments))
        untested = parameters.get(ALLOW_UNTESTED, "").lower() == "true"
        registry = AdapterRegistry(Path(parameters[REGISTRY])) if REGISTRY in parameters else None
        links = None
        if model.nodes > 1:
            model, links = _joined_by_all(model, parameters.get(LEADER))
        return cls(model, allow_untested=untested, registry=registry, links=links)

    def serve(self, control: Connection, listener: socket.socket) -> None:
        """Serve all who connect to `listener`, until `control` asks to stop.

        Raises EOFError when `control` hangs up, or the error that killed the engine.
        """
        try:
            self._loop.run_until_complete(self._serve(control, listener))
            if self._links is not None:
                self._links.close()
        finally:
            control.close()
            self._engine.shutdown()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
            self._loop.close()

    async def _open(self) -> Any:
        """Load the engine inside the event loop, which AsyncLLM needs to watch EngineCore."""
        return engine_api.open_engine(
            self._model.arguments, self._record, allow_untested=self._allow_untested
        )

    def _record(self, measurements: Mapping[str, Sequence[float]]) -> None:
        self._metrics.record(measurements)
        self._kv_cache.record(measurements)

    async def _serve(self, control: Connection, listener: socket.socket) -> None:
        keeper = await Stream.of(control.dup())
        server = await listen(listener, self._accept_peer, self._order)
        obeying = asyncio.create_task(self._obey(keeper))
        watching = asyncio.create_task(self._watch_health())
        telling = asyncio.create_task(self._send_stats())
        try:
            await asyncio.wait({obeying, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, obeying):
                if task.done():
                    task.result()
        finally:
            server.close()
            tasks = [obeying, watching, telling, *self._serving]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            keeper.close()

    async def _obey(self, keeper: Stream) -> None:
        """Sleep and wake up as the keeper orders, until it asks to stop; EOFError without it."""
        sleep = EngineSleep(self._engine, self._model.arguments)
        while not isinstance(order := await keeper.receive(), Stop):
            if isinstance(order, FallAsleep):
                await self._until_idle()
            keeper.send(await sleep.obey(order, running=sum(map(len, self._running.values()))))

    async def _until_idle(self) -> None:
        """Wait for requests whose clients have just left."""
        for _ in range(round(_IDLE_S / _HEALTH_PERIOD_S)):
            if not any(self._running.values()):
                return
            await asyncio.sleep(_HEALTH_PERIOD_S)

    def _accept_peer(self, peer: Peer) -> None:
        task = asyncio.create_task(self._serve_until_gone(peer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve_until_gone(self, peer: Peer) -> None:
        try:
            await self._serve_peer(peer)
        except EOFError:
            pass
        finally:
            peer.close()

    async def _serve_peer(self, peer: Peer) -> None:
        """Serve requests until the peer asks to stop; raises EOFError when it hangs up."""
        peer.write(engine_api.max_num_seqs(self._engine))
        number = next(self._peer_numbers)
        running: dict[int, RunningRequest] = self._running.setdefault(number, {})
        tasks: dict[RunningRequest, asyncio.Task[None]] = {}
        try:
            while (message := await peer.receive()) is not None:
                if isinstance(message, str):  # what it wants to get
                    peer.gets_steps = message == STEPS
                    if message == OWNER:
                        self._owners[peer] = None
                    continue
                kind, handle, request = message
                if kind == "cancel":
                    if (run := running.get(handle)) is not None:
                        run.send(cancelled())
                        self._abort(run.name)  # before the task, which may just be adding it
                        if (starting := tasks.get(run)) is not None:
                            starting.cancel()
                elif isinstance(request, MetricsRequest):
                    peer.sender(handle)(self._metrics.take(), True)
                else:
                    run = RunningRequest(peer, handle, f"{number}-{handle}", request, running)
                    tasks[run] = task = asyncio.create_task(self._run(run, request))
                    task.add_done_callback(partial(_forget, tasks, run))
        finally:
            del self._running[number]
            self._owners.pop(peer, None)
            left = list(running.values())
            dead = self._death and failed(coded_error(self._death))
            for run in left:
                run.send(dead or cancelled())
            if left and not dead:
                await self._engine.abort([run.name for run in left])
            for task in (unfinished := list(tasks.values())):
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def _run(self, run: RunningRequest, request: Any) -> None:
        """Start one request; where vLLM does not hand outputs over, also iterate them."""
        request_id.set(run.name)  # of this task alone
        try:
            if isinstance(request, EmbeddingRequest):
                await self._embed(run, request.prompt or request.input_ids, request.dimensions)
            elif not isinstance(request, EngineRequest):
                await self._run_text(run, request)
            elif request.embeds:
                await self._embed(run, request.input_ids, request.dimensions, request.adapter)
            else:
                await self._run_tokens(run, request)
        except Exception as error:  # noqa: BLE001 - the client must get whatever it is
            run.put(error)

    async def _run_tokens(self, run: RunningRequest, request: EngineRequest) -> None:
        # vLLM would cut output short where the contract promises request_output_len tokens.
        check_prompt(request, max_seq_len=self._model.max_model_len)
        if request.top_log_probs and request.stop_words:
            raise InvalidArgument("top_log_probs: not together with stop_words_list")
        params = engine_api.sampling_params(
            from_engine_request(request),
            stream=request.streaming or run.gets_steps,
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
            run.send(prompt_length(length))
        if self._steps is None:
            await _iterate(run, self._engine.generate(prompt, params, run.name, lora_request=lora))
            return

        def put(output: Any) -> None:
            if run.put(output):
                self._abort(run.name)

        if await self._steps.add_request(run.name, prompt, params, put, lora):
            self._order.flush_soon()

    async def _run_text(self, run: RunningRequest, request: TextRequest) -> None:
        values = dict(request.sampling)
        lora = await self._lora(values.pop(LORA_NAME, None))
        if request.return_cumulative_logprob and values.get("logprobs") is None:
            values["logprobs"] = 0
        params = engine_api.sampling_params(values, stream=request.stream)
        self._limits.check(params, engine_api.bad_word_tokens(self._engine, params))
        prompt: Any = {"prompt": request.prompt}
        if request.images:
            prompt = await self._with_images(prompt, request.images)
            self._room(len(prompt["prompt_token_ids"]))
        outputs = self._engine.generate(prompt, params, run.name, lora_request=lora)
        await _iterate(run, outputs)

    async def _embed(
        self,
        run: RunningRequest,
        prompt: str | Sequence[int],
        dimensions: int | None,
        adapter: str | None = None,
    ) -> None:
        """Embed a prompt in text or token ids; what the model cannot do, vLLM refuses."""
        own: dict[str, Any] = {"prompt": prompt}
        if not isinstance(prompt, str):
            own = {"type": "token", "prompt_token_ids": list(prompt)}
        params = engine_api.pooling_params(dimensions)
        lora = await self._lora(adapter)
        await _iterate(run, self._engine.encode(own, params, run.name, lora_request=lora))

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
        """Tokens that a prompt of `length`, its images' included, leaves; raises E1002."""
        room = self._model.max_model_len - length
        if room < 1:
            raise PromptTooLong(
                f"Prompt length ({length}, images included) exceeds maximum input length"
                f" ({self._model.max_model_len - 1})"
            )
        return room

    def _abort(self, name: str) -> None:
        """Abort a request in vLLM, which ignores those that it does not know."""
        task = asyncio.create_task(self._engine.abort(name))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _lora(self, name: str | None) -> Any:
        """The LoRARequest of an adapter, which vLLM has loaded once; raises E1005 and E1305."""
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

    async def _send_stats(self) -> None:
        """Tell owners of the KV cache whenever that has changed, if vLLM tells us."""
        if self._model.arguments.get("disable_log_stats"):
            return
        while True:
            await asyncio.sleep(_STATS_PERIOD_S)
            block_size, blocks = engine_api.kv_cache_blocks(self._engine)
            stats = self._kv_cache.stats(block_size, blocks, idle=not any(self._running.values()))
            for owner, told in tuple(self._owners.items()):
                if stats != told:
                    self._owners[owner] = stats
                    owner.write(stats)

    async def _watch_health(self) -> None:
        """Health check of an idle engine: raises the error that killed it."""
        while True:
            try:
                await self._engine.check_health()
            except Exception as error:
                self._death = error
                raise
            await asyncio.sleep(_HEALTH_PERIOD_S)


def _joined_by_all(model: VLLMModel, leader: str | None) -> tuple[VLLMModel, LeaderLinks]:
    """The model with the leader's arguments, once all nodes are there; E1005 for its address."""
    nodes = nodes_of(model.arguments, leader)
    links = LeaderLinks(nodes, Hello(0, installed_version(), fingerprint(model)))
    for name, value in network_variables(links.address).items():
        os.environ.setdefault(name, value)
    links.wait(_die_of)
    return replace(model, arguments=node_arguments(model.arguments, nodes, 0, links.address)), links


def _die_of(reason: str) -> None:
    """End this process at once: what is left of the engine waits for a node that is gone."""
    _log.error("the engine ends, and is loaded again: %s", reason)
    os._exit(1)


def _forget(
    tasks: dict[RunningRequest, asyncio.Task[None]], run: RunningRequest, _: object
) -> None:
    del tasks[run]


async def _iterate(run: RunningRequest, outputs: AsyncGenerator[Any, None]) -> None:
    """Send what a request's outputs hold, one at a time, until it has ended."""
    async with aclosing(outputs):  # leaving it early aborts the request
        async for output in outputs:
            run.put(output, at_once=True)
            if run.ended:
                return
    run.send(failed(VLLMUnknownError("vLLM ended the request without a reason")))
