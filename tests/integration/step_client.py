"""A small raw client of Triton's private model ``engine_steps``, also as a program to be killed.

As a program it runs requests of a MockRequest, prints a line once all have tokens, and one at the
end, ``right``; it fails at the first fault.
"""

import json
import queue
import re
import secrets
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
from stack import Stack, pid_of, wait_until

from cog_triton.engines import engine_messages, model_config_proto, step_pipe
from cog_triton.engines.engine_messages import Cancel, Others, Welcome
from cog_triton.engines.mock.mock_request import request_of
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import CACHED, EncodedStep, StepItem, decode
from cog_triton.ipc.framing import FrameDecoder, frame
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton.infer_stream import Tensor, infer_request

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def private_ends(stack: Stack) -> tuple[str, str, str]:
    """Addresses of tritonserver's gRPC and HTTP behind the front, and the model's key."""
    proc = Path("/proc", str(pid_of(stack, "bin/tritonserver")))
    line = (proc / "cmdline").read_text().replace("\0", " ")
    ports = re.findall(r"--(?:http|grpc)-(?:address|port)=(\S+)", line)
    environ = (proc / "environ").read_text().split("\0")
    key = dict(each.split("=", 1) for each in environ if each)[step_pipe.KEY_VARIABLE]
    _, http, host, grpc_port = ports
    return f"{host}:{grpc_port}", f"http://127.0.0.1:{http}", key


class StepClient:
    """A gRPC stream with a pipe to an engine; checks that all tokens come once and in order."""

    def __init__(self, target: str, key: str, replica: int = 0) -> None:
        self.ids: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, StepItem] = {}
        self.widest = 0
        self.others: list[bool] = []
        self.welcome, self.ended = threading.Event(), threading.Event()
        self.wrong = self.error = ""
        self._name = secrets.token_hex(8)
        self._calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        call = self._channel.stream_stream(
            _METHOD,
            response_deserializer=model_config_proto.service().ModelStreamInferResponse.FromString,
        )
        self.call(step_pipe.open_call(replica, key))
        self._stream: Any = call(iter(self._calls.get, None))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def until_open(self) -> "StepClient":
        wait_until(lambda: self.welcome.is_set() or self.ended.is_set())
        assert self.welcome.is_set(), self.error
        return self

    def call(self, call: bytes) -> None:
        tensors = {step_pipe.CALL: Tensor("UINT8", (len(call),), call)}
        self._calls.put(infer_request("engine_steps", self._name, tensors, ends=False))

    def send(self, message: bytes) -> None:
        self.call(step_pipe.SEND + frame(message))

    def submit(self, handle: int, count: int, prompt: tuple[int, ...] = (2, 3), **own: Any) -> None:
        sampling = SamplingParams(max_tokens=count)
        request = EngineRequest(input_ids=prompt, sampling=sampling, end_id=-1)
        self.send(engine_messages.submit(handle, request_of(request, own)))

    def cancel(self, handle: int) -> None:
        self.send(engine_messages.encode(Cancel(handle)))

    def until_ended(self, handle: int) -> StepItem:
        wait_until(lambda: handle in self.ends or self.ended.is_set())
        assert handle in self.ends, self.error
        return self.ends[handle]

    def close(self) -> None:
        """End the stream as the front end does: its pipe first."""
        self.call(step_pipe.CLOSE)
        self._calls.put(None)
        self._thread.join(60)
        self._channel.close()
        assert not self.wrong, self.wrong

    def _read(self) -> None:
        decoder, responses, acked, unread = FrameDecoder(), 0, 0, 0
        order = step_pipe.InOrder()
        try:
            for message in self._stream:
                if message.error_message:
                    self.error = message.error_message
                    break
                content = message.infer_response.raw_output_contents[0]
                responses, unread = responses + 1, unread + len(content)
                for part in order.take(content):
                    for payload in decoder.feed(part):
                        self._take(engine_messages.decode(payload))
                due = responses - acked >= step_pipe.ACK_RESPONSES
                if due or unread >= step_pipe.ACK_BYTES:
                    acked, unread = responses, 0
                    self.call(step_pipe.arrived_call(responses))
        except grpc.RpcError as error:
            self.error = str(error)
        finally:
            self.ended.set()

    def _take(self, message: Any) -> None:
        if isinstance(message, EncodedStep):
            items = decode(message.items.tolist(), message.log_probs.tolist(), message.errors)
            self.widest = max(self.widest, len(items))
            for item in items:
                ids = self.ids[item.handle]
                counts = item.error is None and item.sequence != CACHED
                lost = counts and item.offset != len(ids)
                if lost or item.handle in self.ends:
                    self.wrong = self.wrong or f"{item!r:.200} behind {len(ids)} tokens"
                ids += item.ids
                if item.end:
                    self.ends[item.handle] = item
        elif isinstance(message, Others):
            self.others.append(message.run)
        elif isinstance(message, Welcome):
            self.welcome.set()


def main(target: str, key: str, streams: int, count: int, passage: list[int]) -> None:
    """Run `streams` requests of `count` tokens, all of which say `passage` again and again."""
    client = StepClient(target, key).until_open()
    for handle in range(streams):
        client.submit(handle, count)
    wait_until(lambda: len(client.ids) == streams)
    print("runs", flush=True)
    for handle in range(streams):
        client.until_ended(handle)
        says = (passage * (count // len(passage) + 1))[:count]
        assert client.ids[handle] == says, (handle, len(client.ids[handle]), client.wrong)
    client.close()
    print("right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
