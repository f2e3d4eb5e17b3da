"""A small raw client of Triton's private model ``engine_steps``."""

import base64
import http.client
import json
import re
import secrets
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from stack import Stack, processes_of, wait_until

from cog_triton.engines.step_items import CACHED, StepItem, decode
from cog_triton.engines.step_numbering import HEARTBEAT, RESENT

PATH = "/v2/models/engine_steps/generate"


def private_port(stack: Stack) -> int:
    """Where tritonserver listens behind the front door."""

    def look() -> int:
        for line in processes_of(stack.work_dir).values():
            found = re.search(r"bin/tritonserver .*--http-port=(\d+)", line)
            if found and "reaper.py" not in line:
                return int(found[1])
        return 0

    return int(wait_until(look))


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class StepClient:
    """One step stream: `items` by handle, `numbers` as they came; acknowledges unless told not."""

    def __init__(self, port: int, name: str | None = None, *, acks: bool = True) -> None:
        self.port = port
        self.name = name or secrets.token_hex(16)
        self.acks = acks
        self.items: dict[int, list[StepItem]] = defaultdict(list)
        self.numbers: list[int] = []
        self.resent: list[int] = []
        self.steps: dict[int, list[StepItem]] = {}
        self.heartbeats: list[int] = []
        self.epochs: set[int] = set()
        self.ended = threading.Event()
        self.reads = threading.Event()
        self.reads.set()
        self.error = ""
        self._acknowledged = 0
        self._socket = socket.create_connection(("127.0.0.1", port))
        body = json.dumps({"step_stream": self.name, "step_command": "open"}).encode()
        head = f"POST {PATH}_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        self._threads = [threading.Thread(target=self._read, daemon=True)]
        self._threads += [threading.Thread(target=self._acknowledge, daemon=True)]
        for thread in self._threads:
            thread.start()

    def until_open(self) -> "StepClient":
        wait_until(lambda: self.heartbeats or self.ended.is_set(), 30)
        assert self.heartbeats, self.error
        return self

    def command(self, command: str, **values: Any) -> tuple[int, dict[str, Any]]:
        body = {"step_stream": self.name, "step_command": command, **values}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", PATH, json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def submit(
        self, handle: int, count: int, prompt: Sequence[int] = (2, 3), **values: Any
    ) -> tuple[int, dict[str, Any]]:
        packed = base64.b64encode(struct.pack(f"<{len(prompt)}i", *prompt)).decode()
        return self.command(
            "submit",
            step_handle=handle,
            packed_input_ids=packed,
            request_output_len=count,
            end_id=-1,
            **values,
        )

    def ids(self, handle: int) -> list[int]:
        """The tokens of a request; fails if one is lost, doubled or out of order."""
        found: list[int] = []
        for item in list(self.items[handle]):
            assert item.offset == len(found) or item.sequence == CACHED
            found += item.ids
        return found

    def last(self, handle: int) -> StepItem:
        return self.items[handle][-1]

    def until_ended(self, handle: int, seconds: float = 60) -> StepItem:
        wait_until(lambda: self.items[handle] and self.items[handle][-1].end, seconds)
        return self.items[handle][-1]

    def hang_up(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.acks = False
        self.reads.set()
        if not self.ended.is_set():
            self.command("close")
        for thread in self._threads:
            thread.join(30)

    def _read(self) -> None:
        buffer = b""
        try:
            while True:
                self.reads.wait()
                data = self._socket.recv(65536)
                if not data:
                    break
                buffer += data
                *events, buffer = buffer.split(b"\n\n")
                for event in events:
                    self._take(json.loads(event[event.index(b"data: ") + 6 :]))
                if buffer.endswith(b"0\r\n\r\n"):
                    break
        except OSError:
            pass
        finally:
            self._socket.close()
            self.ended.set()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        epoch, number, flags, count, *ints = event["step"]
        self.epochs.add(epoch)
        if flags & HEARTBEAT:
            self.heartbeats.append(number)
            return
        items = decode(
            ints, as_list(event.get("log_probs", [])), as_list(event.get("step_errors", []))
        )
        assert len(items) == count
        if flags & RESENT:
            self.resent.append(number)
            assert self.steps[number] == items
            return
        assert number == (self.numbers[-1] if self.numbers else 0) + 1
        self.numbers.append(number)
        self.steps[number] = items
        for item in items:
            self.items[item.handle].append(item)

    def _acknowledge(self) -> None:
        while not self.ended.wait(0.05):
            if self.acks and self.numbers and self.numbers[-1] > self._acknowledged:
                number = self.numbers[-1]
                with suppress(OSError, http.client.HTTPException):
                    self.command("ack", step_number=number)
                self._acknowledged = number
