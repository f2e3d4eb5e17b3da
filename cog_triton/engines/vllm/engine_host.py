"""vLLM host process: runs AsyncLLM for the Triton models ``tensorrt_llm`` and ``vllm_model``."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from typing_extensions import Self

from cog_triton.engines.request import EngineRequest
from cog_triton.engines.request_checks import check_prompt
from cog_triton.engines.vllm import engine_api
from cog_triton.engines.vllm.engine_metrics import MetricsBuffer
from cog_triton.engines.vllm.engine_outputs import (
    TextOutputConverter,
    TokenOutputConverter,
    cancelled,
    failed,
)
from cog_triton.engines.vllm.host_connections import Peer, listen, wrap_connection
from cog_triton.engines.vllm.host_messages import MetricsRequest, TextRequest
from cog_triton.engines.vllm.model_directory import VLLMModel, read_model
from cog_triton.engines.vllm.sampling_arguments import LORA_NAME, from_engine_request
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    PromptTooLong,
    TritonUnavailable,
    VLLMUnknownError,
)
from cog_triton.system.log_format import request_id

_log = logging.getLogger(__name__)
_HEALTH_PERIOD_S = 1.0
_PROMPT_TOO_LONG = re.compile(r"longer than the maximum model length")


class VLLMHost:
    """vLLM host: serves one engine to every peer; run by `cog_triton.backend.engine_process`."""

    def __init__(self, model: VLLMModel, socket: str) -> None:
        self._model = model
        self._socket = socket
        self._metrics = MetricsBuffer()
        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(self._open())
        self._peer_numbers = itertools.count(1)
        self._guests: set[asyncio.Task[None]] = set()
        self._loras = {
            name: engine_api.lora_request(name, number, path)
            for number, (name, path) in enumerate(model.loras.items(), 1)
        }

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Load the engine that a rendered model's parameters describe."""
        return cls(read_model(Path(parameters["engine_dir"])), parameters["socket"])

    def serve(self, connection: Connection) -> None:
        """Serve `connection`, and all who connect to the socket, until it asks to stop.

        Raises EOFError when `connection` hangs up, or the error that killed the engine.
        """
        try:
            self._loop.run_until_complete(self._serve(connection))
        finally:
            connection.close()
            self._engine.shutdown()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
            self._loop.close()

    async def _open(self) -> Any:
        """Load the engine inside the event loop, which AsyncLLM needs to watch EngineCore."""
        return engine_api.open_engine(self._model.arguments, self._metrics.record)

    async def _serve(self, connection: Connection) -> None:
        owner = await wrap_connection(connection)
        server = await listen(self._socket, self._accept_guest)
        serving = asyncio.create_task(self._serve_peer(owner))
        watching = asyncio.create_task(self._watch_health())
        try:
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, serving):
                if task.done():
                    task.result()
        finally:
            server.close()
            owner.close()
            tasks = [serving, watching, *self._guests]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _accept_guest(self, peer: Peer) -> None:
        task = asyncio.create_task(self._serve_guest(peer))
        self._guests.add(task)
        task.add_done_callback(self._guests.discard)

    async def _serve_guest(self, peer: Peer) -> None:
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
        running: dict[int, asyncio.Task[None]] = {}
        try:
            while (message := await peer.receive()) is not None:
                kind, handle, request = message
                name = f"{number}-{handle}"
                if kind == "cancel":
                    if (task := running.get(handle)) is not None:
                        await self._engine.abort(name)
                        task.cancel()
                elif isinstance(request, MetricsRequest):
                    peer.send(handle, self._metrics.take())
                else:
                    task = asyncio.create_task(self._run(peer, handle, name, request))
                    running[handle] = task
                    task.add_done_callback(partial(_forget, running, handle))
        finally:
            left = list(running.values())
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _run(self, peer: Peer, handle: int, name: str, request: Any) -> None:
        """Run one request; sends exactly one last event."""
        request_id.set(name)  # of this task alone
        try:
            converter, outputs = self._start(name, request)
            async with aclosing(outputs):  # leaving it early aborts the request
                async for output in outputs:
                    event = converter.convert(output)
                    if event is None:
                        continue
                    peer.send(handle, event)
                    if event.finish is not None or event.error is not None:
                        return
            last = failed(VLLMUnknownError("vLLM ended the request without a reason"))
        except asyncio.CancelledError:
            last = cancelled()
        except Exception as error:  # noqa: BLE001 - the client must get whatever it is
            last = failed(_coded_error(error))
        peer.send(handle, last)

    def _start(self, name: str, request: EngineRequest | TextRequest) -> tuple[Any, Any]:
        if isinstance(request, EngineRequest):
            # vLLM would cut output short where the contract promises request_output_len tokens.
            check_prompt(request, max_seq_len=self._model.max_model_len)
            params = engine_api.sampling_params(
                from_engine_request(request), stream=request.streaming, bad_words=request.bad_words
            )
            prompt: Any = {"prompt_token_ids": list(request.input_ids)}
            return TokenOutputConverter(request), self._engine.generate(prompt, params, name)
        values = dict(request.sampling)
        lora = self._lora(values.pop(LORA_NAME, None))
        if request.return_cumulative_logprob and values.get("logprobs") is None:
            values["logprobs"] = 0
        params = engine_api.sampling_params(values, stream=request.stream)
        prompt = {"prompt": request.prompt}
        return TextOutputConverter(request), self._engine.generate(
            prompt, params, name, lora_request=lora
        )

    def _lora(self, name: str | None) -> Any:
        if name is None:
            return None
        if not self._model.arguments.get("enable_lora"):
            raise InvalidArgument(f"{LORA_NAME}={name!r}: LoRA feature is not enabled.")
        if name not in self._loras:
            raise InvalidArgument(
                f"{LORA_NAME}: LoRA {name} is not supported, we currently support"
                f" {list(self._loras)}"
            )
        return self._loras[name]

    async def _watch_health(self) -> None:
        """Health check of an idle engine: raises the error that killed it."""
        while True:
            await self._engine.check_health()
            await asyncio.sleep(_HEALTH_PERIOD_S)


def _forget(running: dict[int, asyncio.Task[None]], handle: int, _: object) -> None:
    del running[handle]


def _coded_error(error: Exception) -> CogTritonError:
    if isinstance(error, CogTritonError):
        return error
    if engine_api.is_engine_dead(error):
        return TritonUnavailable(f"vLLM's engine is dead: {error}")
    if isinstance(error, ValueError | TypeError):  # how vLLM refuses a request
        known = PromptTooLong if _PROMPT_TOO_LONG.search(str(error)) else InvalidArgument
        return known(str(error))
    _log.error("vLLM failed a request", exc_info=error)
    cause = error.__cause__ or error
    return VLLMUnknownError(f"{type(cause).__name__}: {cause}")
