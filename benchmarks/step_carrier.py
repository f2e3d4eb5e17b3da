"""The step stream's carrier: HTTP as it is, beside Triton's gRPC stream with a parser of our own.

    python benchmarks/step_carrier.py [--streams 64] [--tps 100] [--seconds 10] [--rounds 3]

One mock server; a client process opens a step stream in turns by either carrier, sends as many
requests, and reads what is made. Prints us of CPU a token of the client, of tritonserver and of the
stub, and what gRPC costs more: it is to be taken if that is at most 3 us a token. gRPC loses no
response, so that numbers, acknowledgements and resending could go with HTTP.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import _resource_usage
import grpc
from _servers import STEP_CLOCK, Server, mock_server
from tritonclient.grpc import service_pb2

from cog_triton.engines import step_numbering as wire
from cog_triton.engines.base import EngineFamily
from cog_triton.engines.generate_stream import STEP_MODEL
from cog_triton.engines.mock.mock_request import MockRequest
from cog_triton.engines.step_items import StepItem
from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton.step_session import StepSession
from cog_triton.triton.step_stream import StepStream
from cog_triton.triton.triton_connections import Exchange, Receiver

_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_BYTES, _INT64 = {wire.STREAM, wire.COMMAND}, "INT64"
_MOST_US = 3.0


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Fields of a protobuf message that have a length: number, first byte, end."""
    while start < end:
        key, start = _varint(data, start)
        if key & 7 == 2:
            size, start = _varint(data, start)
            yield key >> 3, start, start + size
            start += size
        elif key & 7 == 0:
            start = _varint(data, start)[1]
        else:
            start += 4 if key & 7 == 5 else 8


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def step_of(data: bytes) -> tuple[str, list[int]]:
    """Error, and output `wire.STEP`, of a ModelStreamInferResponse, read as bytes."""
    error, step, names, raw = "", [], [], []
    for number, start, end in fields(data, 0, len(data)):
        if number == 1:
            error = data[start:end].decode("utf-8", "replace")
            continue
        for inner, begin, stop in fields(data, start, end):
            if inner == 5:  # outputs: the first field of each is its name
                size, at = _varint(data, begin + 1)
                names.append(data[at : at + size])
            elif inner == 6:
                raw.append((begin, stop))
    for name, (begin, stop) in zip(names, raw, strict=True):
        if name == wire.STEP.encode():
            numbers = array("q")
            numbers.frombytes(memoryview(data)[begin:stop])
            step = numbers.tolist()
    return error, step


class _Call(Exchange):
    """The long request as a gRPC stream; its responses are read in a thread."""

    def __init__(self, address: str, values: Mapping[str, Any], session: Any) -> None:
        options = [("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(address, options)
        call = self._channel.stream_stream(
            _STREAM_INFER, request_serializer=None, response_deserializer=None
        )
        self._ended = threading.Event()
        request = _request(values).SerializeToString()

        def requests() -> Iterator[bytes]:
            yield request
            self._ended.wait()

        self._responses = call(requests())
        threading.Thread(target=self._read, args=(session,), daemon=True).start()

    def _read(self, session: Any) -> None:
        try:
            for data in self._responses:
                error, step = step_of(data)
                if error:
                    raise TritonUnavailable(error)
                if step:
                    session.on_step(step)
        except grpc.RpcError:
            pass  # it was ended

    def abort(self) -> None:
        self._ended.set()
        self._channel.close()


def _request(values: Mapping[str, Any]) -> Any:
    request = service_pb2.ModelInferRequest(model_name=STEP_MODEL)
    for name, value in values.items():
        tensor = request.inputs.add(name=name, shape=[1, 1])
        if name in _BYTES:
            tensor.datatype = "BYTES"
            content = str(value).encode()
            request.raw_input_contents.append(struct.pack("<I", len(content)) + content)
        else:
            tensor.datatype = _INT64
            request.raw_input_contents.append(struct.pack("<q", value))
    return request


class _GRPCSession(StepSession):
    """A session whose steps come as lists, parsed already."""

    def on_step(self, step: list[int]) -> None:
        """Take one step."""
        self._heard_at = time.monotonic()
        self._take({wire.STEP: step})
        if self._steps.is_ack_due():
            self._acknowledge(self._heard_at)


class _GRPCStream(StepStream):
    """A step stream whose long request goes by gRPC; all else by HTTP."""

    address = ""

    def _send(self, values: Mapping[str, Any], receiver: Receiver, streams: bool) -> Exchange:
        if streams:
            return _Call(self.address, values, receiver)
        return super()._send(values, receiver, streams)

    def _new_session(self) -> StepSession:
        return _GRPCSession(
            self._send, self._to_error, self._timeout, self.statistics, self._reopen
        )


def _to_error(text: str) -> CogTritonError:
    return TritonUnavailable(text)


def read(carrier: str, url: str, address: str, streams: int, seconds: float) -> None:
    """Child: read `streams` requests' tokens for so long; prints tokens and CPU seconds."""
    kind = _GRPCStream if carrier == "grpc" else StepStream
    encode = EngineFamily.encode_request
    stream = kind(url, 60.0, _to_error, lambda request: encode(None, request))  # type: ignore[arg-type]
    if isinstance(stream, _GRPCStream):
        stream.address = address
    count, failed = [0], []

    def put(item: StepItem) -> None:
        count[0] += len(item.ids)
        if item.error:
            failed.append(item.error)

    stream.open()
    for _ in range(streams):
        request = MockRequest(input_ids=[1] * 16, sampling=SamplingParams(max_tokens=100_000))
        stream.submit(request, {}, put)
    while count[0] < streams and not failed:
        time.sleep(0.01)
    print("began", flush=True)
    tokens, used = count[0], time.process_time()
    time.sleep(seconds)
    tokens, used = count[0] - tokens, time.process_time() - used
    print(tokens, used, failed[:1], flush=True)
    sys.stdin.readline()
    stream.disconnect()


def triton_ports(server: Server) -> tuple[str, str]:
    """Triton's own HTTP URL and gRPC address, which the front door does not publish."""
    found: dict[str, str] = {}
    for _, pid in _resource_usage.tree(server.pid, *server.beside):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if Path(words[0]).name == "tritonserver":
            found |= {key: value for key, _, value in (word.partition("=") for word in words)}
    http = f"http://{found['--http-address']}:{found['--http-port']}"
    return http, f"{found['--grpc-address']}:{found['--grpc-port']}"


def measure(server: Server, carrier: str, streams: int, seconds: float) -> dict[str, float]:
    """us of CPU a token of each part while a child reads by `carrier`."""
    own = [sys.executable, __file__, "--child", carrier, *triton_ports(server)]
    command = [*own, "--streams", str(streams), "--seconds", str(seconds)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        if child.stdout.readline() != "began\n":
            raise SystemExit(f"{carrier}: it did not begin")
        before = server.cpu_seconds()
        told = child.stdout.readline().split(maxsplit=2)
        after = server.cpu_seconds()
        child.stdin.close()
    tokens = int(told[0])
    if not tokens or told[2].strip() != "[]":
        raise SystemExit(f"{carrier}: {told}")
    parts = {name: used - before.get(name, 0.0) for name, used in after.items()}
    stub = sum(used for name, used in parts.items() if "engine_steps" in name)
    found = {"client": float(told[1]), "tritonserver": parts.get("tritonserver", 0.0), "stub": stub}
    per_token = {name: 1e6 * used / tokens for name, used in found.items()}
    return {**per_token, "all": sum(per_token.values()), "tok/s": tokens / seconds}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tps", type=float, default=100, help="tokens a second of a stream")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        read(*options.child, options.streams, options.seconds)
        return
    rows: dict[str, list[dict[str, float]]] = {"http": [], "grpc": []}
    with mock_server(tps=options.tps, clock=STEP_CLOCK) as server:
        for number in range(options.rounds):
            for carrier in sorted(rows, reverse=bool(number % 2)):
                rows[carrier].append(measure(server, carrier, options.streams, options.seconds))
    print(f"{options.streams} streams of {options.tps:g} tok/s, us of CPU a token, medians")
    names = list(rows["http"][0])
    medians = {
        carrier: {name: statistics.median(row[name] for row in found) for name in names}
        for carrier, found in rows.items()
    }
    print("| carrier | " + " | ".join(names) + " |")
    print("|---|" + "--:|" * len(names))
    for carrier, found in medians.items():
        print(f"| {carrier} | " + " | ".join(f"{found[name]:.1f}" for name in names) + " |")
    apart = [b["all"] - a["all"] for a, b in zip(rows["http"], rows["grpc"], strict=True)]
    more = medians["grpc"]["all"] - medians["http"]["all"]
    print(f"gRPC costs {more:+.1f} us a token ({min(apart):+.1f} to {max(apart):+.1f} in pairs);")
    print(f"it is to be taken at {_MOST_US:+.1f} or less")


if __name__ == "__main__":
    main()
