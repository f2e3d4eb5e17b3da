"""LLM API host process: runs `tensorrt_llm.LLM` for the Triton model ``tensorrt_llm``."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from cog_triton.engines.llmapi import llmapi_engine
from cog_triton.engines.llmapi.llmapi_directory import LLMAPIModel, read_model
from cog_triton.engines.llmapi.llmapi_sampling import from_engine_request
from cog_triton.engines.llmapi.output_converter import OutputConverter, failed
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.request_checks import check_prompt
from cog_triton.engines.step_items import STEPS
from cog_triton.engines.vllm.host_connections import Peer, SendOrder, listen
from cog_triton.errors import TritonUnknownError
from cog_triton.ipc.connection import Connection
from cog_triton.ipc.streams import Stream
from cog_triton.keeper.keeper_messages import Stop

_log = logging.getLogger(__name__)


class _Running:
    """One request: what it sends ends once."""

    def __init__(self, send: Callable[[TokenEvent, bool], None]) -> None:
        self._send = send
        self.ended = False
        self.output: Any = None
        """TensorRT-LLM's RequestOutput, once the request is in the engine."""

    def send(self, event: TokenEvent) -> None:
        """Queue an event, unless the last one was queued."""
        if not self.ended:
            self.ended = event.finish is not None or event.error is not None
            self._send(event, True)

    def cancel(self) -> None:
        """Abort the request, and end it at once."""
        if self.output is not None and not self.ended:
            self.output.abort()
        self.send(TokenEvent([], [], "cancelled"))


class LLMAPIHost:
    """LLM API host: serves one engine to every peer; run by `cog_triton.backend.engine_process`."""

    def __init__(self, model: LLMAPIModel) -> None:
        self._model = model
        self._engine = llmapi_engine.open_engine(model.arguments)
        self._penalties = llmapi_engine.heeds_penalties(model.arguments)
        self._order = SendOrder()
        self._serving: set[asyncio.Task[None]] = set()

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Load the engine that a rendered model's parameters describe."""
        return cls(read_model(Path(parameters["engine_dir"])))

    def serve(self, control: Connection, listener: socket.socket) -> None:
        """Serve all who connect to `listener`, until `control` asks to stop.

        Raises EOFError when `control` hangs up.
        """
        try:
            asyncio.run(self._serve(control, listener))
        finally:
            control.close()
            self._engine.shutdown()

    async def _serve(self, control: Connection, listener: socket.socket) -> None:
        keeper = await Stream.of(control.dup())
        server = await listen(listener, self._accept_peer, self._order)
        try:
            while not isinstance(await keeper.receive(), Stop):
                pass  # orders to sleep are not given: the engine cannot be parked
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
            keeper.close()

    def _accept_peer(self, peer: Peer) -> None:
        task = asyncio.create_task(self._serve_peer(peer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve_peer(self, peer: Peer) -> None:
        """Serve requests until the peer asks to stop or hangs up."""
        peer.write(self._model.max_batch_size)
        running: dict[int, _Running] = {}
        tasks: set[asyncio.Task[None]] = set()
        try:
            while (message := await peer.receive()) is not None:
                if isinstance(message, str):  # what it wants to get
                    peer.gets_steps = message == STEPS
                    continue
                kind, handle, request = message
                if kind == "cancel":
                    if (one := running.get(handle)) is not None:
                        one.cancel()
                    continue
                one = running[handle] = _Running(peer.sender(handle, request.log_prob_width))
                task = asyncio.create_task(self._run(one, request))
                tasks.add(task)

                def forget(task: asyncio.Task[None], handle: int = handle) -> None:
                    tasks.discard(task)
                    running.pop(handle, None)

                task.add_done_callback(forget)
        except EOFError:
            pass
        finally:
            for one in tuple(running.values()):
                one.cancel()
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            peer.close()

    async def _run(self, run: _Running, request: EngineRequest) -> None:
        try:
            await self._generate(run, request)
        except Exception as error:  # noqa: BLE001 - the client must get whatever it is
            coded = llmapi_engine.coded_error(error)
            if isinstance(coded, TritonUnknownError):
                _log.error("TensorRT-LLM failed a request", exc_info=error)
            run.send(failed(coded))

    async def _generate(self, run: _Running, request: EngineRequest) -> None:
        model = self._model
        check_prompt(request, max_seq_len=model.max_seq_len, max_input_len=model.max_input_len)
        values = from_engine_request(request, penalties=self._penalties)
        params = llmapi_engine.sampling_params(values)
        converter = OutputConverter(request, model.end_ids)
        run.output = self._engine.generate_async(list(request.input_ids), params, streaming=True)
        async for output in run.output:
            if run.ended:
                return
            if (event := converter.convert(output)) is not None:
                run.send(event)
                if run.ended and not output.finished:  # at a stop word
                    run.output.abort()
                    return
        run.send(failed(TritonUnknownError("TensorRT-LLM ended the request without a reason")))
