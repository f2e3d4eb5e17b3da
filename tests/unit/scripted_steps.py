"""A real gRPC server whose model ``engine_steps`` does as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Self

import grpc
from scripted_server import wait_until

from cog_triton.engines import engine_messages, model_config_proto, step_items, step_pipe
from cog_triton.engines.engine_messages import Submit, Welcome
from cog_triton.engines.step_items import StepItem
from cog_triton.ipc.framing import FrameDecoder, frame

_pb = model_config_proto.service()


def step(*items: StepItem) -> bytes:
    """A step as it comes through a pipe."""
    return frame(engine_messages.encode(step_items.encode(items)))


class ScriptedPipe:
    """An open pipe: `messages` came for the engine, `arrived` are acknowledgements."""

    def __init__(self, call: bytes, send: Callable[[Any], None]) -> None:
        self.replica, self.key = step_pipe.read_open(call)
        self.messages: list[Any] = []
        self.arrived: list[int] = []
        self.closed = threading.Event()
        self._decoder = FrameDecoder()
        self._send = send
        self._sent = 0

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.messages if isinstance(message, Submit)]

    def requests(self, count: int = 1) -> list[Submit]:
        """Those that came, once there are so many."""
        wait_until(lambda: len(self.submits) >= count)
        return self.submits

    def send(self, *contents: bytes) -> None:
        """A response for each."""
        self.send_mixed(*contents, order=range(len(contents)))

    def send_mixed(self, *contents: bytes, order: Iterable[int]) -> None:
        """A response for each, those in another `order` as Triton may have them."""
        numbered = [step_pipe.numbered(self._sent + n, one) for n, one in enumerate(contents)]
        self._sent += len(contents)
        for place in order:
            response = _pb.ModelInferResponse(raw_output_contents=[numbered[place]])
            self._send(_pb.ModelStreamInferResponse(infer_response=response))

    def say(self, message: Any) -> None:
        self.send(frame(engine_messages.encode(message)))

    def welcome(self, generation: int = 1) -> None:
        self.say(Welcome(64, generation))

    def fail(self, error: str) -> None:
        self._send(_pb.ModelStreamInferResponse(error_message=error))

    def take(self, call: bytes) -> None:
        if call[:1] == step_pipe.SEND:
            self.messages += map(engine_messages.decode, self._decoder.feed(call[1:]))
        elif call[:1] == step_pipe.ARRIVED:
            self.arrived.append(int(call[1:]))
        else:
            assert call == step_pipe.CLOSE
            self.closed.set()


class ScriptedSteps:
    """`pipes` are those that were opened; with `welcomes` the engine does so at once."""

    def __init__(self) -> None:
        self.pipes: list[ScriptedPipe] = []
        self.welcomes = True
        self._outs: list[SimpleQueue[Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(8))
        handler = grpc.stream_stream_rpc_method_handler(
            self._serve,
            _pb.ModelInferRequest.FromString,
            _pb.ModelStreamInferResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(
            "inference.GRPCInferenceService", {"ModelStreamInfer": handler}
        )
        self._server.add_generic_rpc_handlers((service,))
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.break_streams()
        self._server.stop(0).wait()

    def pipe(self, number: int = 0) -> ScriptedPipe:
        """The pipe that was opened as the `number`-th."""
        wait_until(lambda: len(self.pipes) > number)
        return self.pipes[number]

    def break_streams(self) -> None:
        """End all gRPC streams."""
        for out in self._outs:
            out.put(None)

    def _serve(self, requests: Iterable[Any], context: Any) -> Iterator[Any]:
        out: SimpleQueue[Any] = SimpleQueue()
        self._outs.append(out)
        threading.Thread(target=self._read, args=[requests, out], daemon=True).start()
        yield from iter(out.get, None)

    def _read(self, requests: Iterable[Any], out: SimpleQueue[Any]) -> None:
        pipes: dict[str, ScriptedPipe] = {}
        try:
            for request in requests:
                assert request.model_name == "engine_steps"
                (call,) = request.raw_input_contents
                if call[:1] == step_pipe.OPEN:
                    self._open(pipes, request.id, call, out)
                elif request.id in pipes:
                    pipes[request.id].take(call)
        except grpc.RpcError:
            pass  # the client has gone
        finally:
            out.put(None)

    def _open(
        self, pipes: dict[str, ScriptedPipe], name: str, call: bytes, out: SimpleQueue[Any]
    ) -> None:
        def send(message: Any) -> None:
            message.infer_response.id = name
            out.put(message)

        pipes[name] = pipe = ScriptedPipe(call, send)
        if self.welcomes:
            pipe.welcome()
        self.pipes.append(pipe)
