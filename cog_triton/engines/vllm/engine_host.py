"""The process that runs AsyncLLM, for the Triton models ``tensorrt_llm`` and ``vllm_model``."""

from __future__ import annotations

import asyncio
import itertools
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
from cog_triton.engines.vllm.engine_outputs import TextReply, TokenReply, cancelled, failed
from cog_triton.engines.vllm.engine_peers import Peer, adopt, listen
from cog_triton.engines.vllm.engine_sampling import LORA_NAME, from_contract
from cog_triton.engines.vllm.engine_stats import Recorder
from cog_triton.engines.vllm.host_messages import MetricsRequest, TextRequest
from cog_triton.engines.vllm.model_directory import VLLMModel, read_model
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    PromptTooLong,
    TritonUnavailable,
    VLLMUnknownError,
)

_HEALTH_PERIOD_S = 1.0
_TOO_LONG = re.compile(r"longer than the maximum model length")


class VLLMHost:
    """Serves one engine to every peer; `cog_triton.backend.engine_process` opens and runs it."""

    def __init__(self, model: VLLMModel, socket: str) -> None:
        self._model = model
        self._socket = socket
        self._recorder = Recorder()
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
        """Load what a rendered model's parameters describe."""
        return cls(read_model(Path(parameters["engine_dir"])), parameters["socket"])

    def serve(self, connection: Connection) -> None:
        """Serve `connection`, and whoever connects besides, until it asks for the end.

        Raises EOFError when it hangs up, and what killed the engine when that is dead.
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
        """Load the engine within the loop: from its first moment on, its death is noticed."""
        return engine_api.open_engine(self._model.arguments, self._recorder.record)

    async def _serve(self, connection: Connection) -> None:
        owner = await adopt(connection)
        server = await listen(self._socket, self._welcome)
        serving = asyncio.create_task(self._serve_peer(owner))
        watching = asyncio.create_task(self._watch())
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

    def _welcome(self, peer: Peer) -> None:
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
        """Take requests until the peer says that there are no more; raises EOFError."""
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
                    peer.send(handle, self._recorder.take())
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
        """Answer one request; nothing follows its last event."""
        try:
            reply, outputs = self._start(name, request)
            async with aclosing(outputs):  # to leave it early is to abort the request
                async for output in outputs:
                    event = reply.feed(output)
                    if event is None:
                        continue
                    peer.send(handle, event)
                    if event.finish is not None or event.error is not None:
                        return
            last = failed(VLLMUnknownError("vLLM ended the request without a reason"))
        except asyncio.CancelledError:
            last = cancelled()
        except Exception as error:  # noqa: BLE001 - whatever it is, its client must hear of it
            last = failed(_coded(error))
        peer.send(handle, last)

    def _start(self, name: str, request: EngineRequest | TextRequest) -> tuple[Any, Any]:
        if isinstance(request, EngineRequest):
            # vLLM would cut output short where the contract promises request_output_len tokens.
            check_prompt(request, max_seq_len=self._model.max_model_len)
            params = engine_api.sampling_params(
                from_contract(request), stream=request.streaming, bad_words=request.bad_words
            )
            prompt: Any = {"prompt_token_ids": list(request.input_ids)}
            return TokenReply(request), self._engine.generate(prompt, params, name)
        values = dict(request.sampling)
        lora = self._lora(values.pop(LORA_NAME, None))
        if request.return_cumulative_logprob and values.get("logprobs") is None:
            values["logprobs"] = 0
        params = engine_api.sampling_params(values, stream=request.stream)
        prompt = {"prompt": request.prompt}
        return TextReply(request), self._engine.generate(prompt, params, name, lora_request=lora)

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

    async def _watch(self) -> None:
        """Raise what killed the engine, also when no request runs that would notice."""
        while True:
            await self._engine.check_health()
            await asyncio.sleep(_HEALTH_PERIOD_S)


def _forget(running: dict[int, asyncio.Task[None]], handle: int, _: object) -> None:
    del running[handle]


def _coded(error: Exception) -> CogTritonError:
    if isinstance(error, CogTritonError):
        return error
    if engine_api.is_death(error):
        return TritonUnavailable(f"vLLM's engine is dead: {error}")
    if isinstance(error, ValueError | TypeError):  # so vLLM refuses a request
        known = PromptTooLong if _TOO_LONG.search(str(error)) else InvalidArgument
        return known(str(error))
    cause = error.__cause__ or error
    return VLLMUnknownError(f"{type(cause).__name__}: {cause}")
