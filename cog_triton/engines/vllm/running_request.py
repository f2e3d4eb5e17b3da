"""Running request of the vLLM host: converts vLLM's outputs, sends them, and ends once."""

from __future__ import annotations

from typing import Any

from cog_triton.engines.request import EngineRequest
from cog_triton.engines.vllm.embedding_outputs import EmbeddingConverter
from cog_triton.engines.vllm.engine_errors import coded_error
from cog_triton.engines.vllm.engine_outputs import (
    TextOutputConverter,
    TokenOutputConverter,
    failed,
)
from cog_triton.engines.vllm.host_connections import Peer
from cog_triton.engines.vllm.host_messages import EmbeddingRequest


class RunningRequest:
    """Running request of one peer; nothing is sent after its last event."""

    def __init__(
        self, peer: Peer, handle: int, name: str, request: Any, running: dict[int, RunningRequest]
    ) -> None:
        """`name` is vLLM's for it; it is in `running`, by its handle, until it ends."""
        of_tokens = isinstance(request, EngineRequest)
        self.name = name
        self.ended = False
        self.gets_steps = peer.gets_steps
        self._converter = _converter(request)
        self._handle = handle
        self._queue = peer.sender(handle, request.log_prob_width if of_tokens else 0)
        self._running = running
        running[handle] = self

    def put(self, output: Any, *, at_once: bool = False) -> bool:
        """Send what a RequestOutput holds, or the exception that ends the request; never raises.

        It leaves at the end of the engine step, or with `at_once` at the loop's next turn, as
        errors and cancellations do: they may come when no step is under way. Returns whether the
        request ended here and goes on in vLLM.
        """
        if self.ended:
            return False
        try:
            if isinstance(output, Exception):
                raise output
            if (prompt := self._converter.prompt_event(output)) is not None:
                self.send(prompt, at_once=at_once)
            event = self._converter.convert(output)
        except Exception as error:  # noqa: BLE001 - in vLLM's output handler it would end them all
            self.send(failed(coded_error(error)))
            return not isinstance(output, Exception)
        if event is not None:
            at_once |= event.error is not None or event.finish == "cancelled"
            self.send(event, at_once=at_once)
        return self.ended and not output.finished

    def send(self, event: Any, *, at_once: bool = True) -> None:
        """Queue an event, unless the last one was queued."""
        if self.ended:
            return
        if event.finish is not None or event.error is not None:
            self.ended = True
            self._running.pop(self._handle, None)
        self._queue(event, at_once)


def _converter(request: Any) -> TokenOutputConverter | TextOutputConverter | EmbeddingConverter:
    if isinstance(request, EmbeddingRequest):
        return EmbeddingConverter(as_text=True)
    if not isinstance(request, EngineRequest):
        return TextOutputConverter(request)
    return EmbeddingConverter(as_text=False) if request.embeds else TokenOutputConverter(request)
