"""A Triton with scripted answers, over a real gRPC server."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Self

import grpc
from loop_thread import call
from scripted_server import HANG, PATIENCE_S, RESET, Part, wait_until

from cog_triton import errors
from cog_triton.engines import tensor_contract
from cog_triton.triton.infer_stream import service_pb2
from cog_triton.triton.model_repository import read_config
from cog_triton.triton.request_streams import ModelInput, RequestStreams, model_inputs

_CONFIG = read_config(Path(__file__).parents[1] / "triton_model_repo/tensorrt_llm/config.pbtxt")
_LISTS = {item.name for item in _CONFIG.input if -1 in item.dims}
_FORMATS = {"BOOL": "?", "INT32": "i", "UINT64": "Q", "FP32": "f"}
_OWN = {"tps": ModelInput("INT32", [1, 1]), "lora_name": ModelInput("BYTES", [1, 1])}
INPUTS = {**model_inputs(_CONFIG), **_OWN}


def to_error(text: str) -> errors.CogTritonError:
    """The coded error of an error text of Triton."""
    return errors.from_text(text) or errors.TritonUnknownError(text)


Answer = Sequence[Part] | Callable[["Request"], Iterable[Part]]


class Request:
    """What came in; `left` is set once it was stopped, or its connection has ended."""

    def __init__(self, content: bytes) -> None:
        message = service_pb2.ModelInferRequest.FromString(content)
        pairs = zip(message.inputs, message.raw_input_contents, strict=True)
        self.model, self.id, self.left = message.model_name, message.id, Event()
        self.values = {item.name: _value(item, content) for item, content in pairs}

    def responses(self, parts: Iterable[Part]) -> Iterator[Any]:
        """ModelStreamInferResponses, the last one empty; RESET if the connection is to break."""
        for part in parts:
            if isinstance(part, Event):
                assert part.wait(PATIENCE_S)
            elif part is HANG:
                self.left.wait()
            elif part is RESET:
                yield RESET
                return
            else:
                yield self._response(part)
        yield self._response({}, last=True)

    def _response(self, outputs: Any, *, last: bool = False) -> Any:
        made = service_pb2.ModelStreamInferResponse(error_message=outputs.get("error", ""))
        made.infer_response.id = self.id
        made.infer_response.parameters["triton_final_response"].bool_param = last
        for name in outputs.keys() - {"error"}:
            values = outputs[name] if isinstance(outputs[name], list) else [outputs[name]]
            kind = "FP32" if any(isinstance(value, float) for value in values) else "INT32"
            made.infer_response.outputs.add(name=name, datatype=kind, shape=[1, len(values)])
            content = struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values)
            made.infer_response.raw_output_contents.append(content)
        return made


class ScriptedTriton:
    """Answers requests, but for each `stop`, as it is told; within ``with``."""

    def __init__(self, answer: Answer, address: str = "127.0.0.1:0") -> None:
        self.answer_with(answer)
        self.requests: list[Request] = []
        self._server = grpc.server(ThreadPoolExecutor(256))
        one = grpc.unary_unary_rpc_method_handler(self._one)
        many = grpc.stream_stream_rpc_method_handler(self._many)
        methods = {"ModelInfer": one, "ModelStreamInfer": many}
        service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)
        self._server.add_generic_rpc_handlers([service])
        self.target = f"127.0.0.1:{self._server.add_insecure_port(address)}"

    def answer_with(self, answer: Answer) -> None:
        """Give this answer, or the one it chooses by the request, from now on."""
        self._answer = answer if callable(answer) else lambda _: answer

    def transport(self, timeout: float = 2 * PATIENCE_S) -> RequestStreams:
        """The way to it, which is to be opened."""
        encode = tensor_contract.encode_request
        return RequestStreams(lambda: self.target, timeout, to_error, encode, INPUTS)

    @contextmanager
    def connected(self, timeout: float = 2 * PATIENCE_S) -> Iterator[RequestStreams]:
        """The way to it, opened on the loop."""
        transport = self.transport(timeout)
        call(transport.open, {})
        try:
            yield transport
        finally:
            call(transport.disconnect)

    def request(self, number: int = 0) -> Request:
        """A request, by the order of arrival; waits for it."""
        wait_until(lambda: len(self.requests) > number)
        return self.requests[number]

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def _taken(self, content: bytes) -> tuple[Request, Iterator[Any]]:
        request = Request(content)
        if not request.values.get("stop"):
            self.requests.append(request)
            return request, request.responses(self._answer(request))
        next(one for one in self.requests if one.id == request.id).left.set()
        return request, request.responses([])

    def _one(self, content: bytes, context: Any) -> bytes:
        request, responses = self._taken(content)
        context.add_callback(request.left.set)
        if (response := next(responses)) is RESET:
            context.abort(grpc.StatusCode.UNAVAILABLE, "reset")
        if response.error_message:
            context.abort(grpc.StatusCode.INTERNAL, response.error_message)
        return bytes(response.infer_response.SerializeToString())

    def _many(self, contents: Iterable[bytes], context: Any) -> Iterator[bytes]:
        queue: SimpleQueue[Any] = SimpleQueue()

        def read() -> None:
            with ExitStack() as stack:
                stack.callback(queue.put, None)
                for content in contents:
                    request, responses = self._taken(content)
                    assert request.values.get("streaming"), "Triton would have it wait for others"
                    stack.callback(request.left.set)
                    Thread(target=list, args=[map(queue.put, responses)], daemon=True).start()

        Thread(target=read, daemon=True).start()
        for response in iter(queue.get, None):
            if response is RESET:
                context.abort(grpc.StatusCode.UNAVAILABLE, "reset")
            yield response.SerializeToString()


def event(**outputs: Any) -> Part:
    """A response of these outputs, or of an `error`."""
    return outputs


def _value(item: Any, content: bytes) -> Any:
    if item.datatype == "BYTES":
        return content[4:].decode()
    values = [value for (value,) in struct.iter_unpack(f"<{_FORMATS[item.datatype]}", content)]
    return values if item.name in _LISTS else values[0]
