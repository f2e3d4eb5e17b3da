"""Hostile requests as bytes: a table of those that have cost a server much, and mutations.

All come from one random generator, whose seed the report tells.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PORTS = ("cog", "openai", "triton", "metrics")
_PREDICTION = {"input": {"prompt": "rivers", "max_tokens": 4}}
_MESSAGES = [{"role": "user", "content": "x"}]
_CHAT = {"model": "mock", "max_tokens": 4, "messages": _MESSAGES}
_TOKENS_IN = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 4, "streaming": True}
_VALID: dict[str, list[tuple[str, str, Any]]] = {
    "cog": [
        ("POST", "/predictions", _PREDICTION),
        ("PUT", "/predictions/abc", _PREDICTION),
        ("POST", "/predictions/abc/cancel", None),
        ("GET", "/health-check", None),
        ("GET", "/openapi.json", None),
    ],
    "openai": [
        ("POST", "/v1/chat/completions", _CHAT),
        ("POST", "/v1/completions", {"model": "mock", "prompt": "x", "max_tokens": 4}),
        (
            "POST",
            "/v1/responses",
            {"model": "mock", "input": "x", "max_output_tokens": 4, "background": True,
             "stream": True, "store": True, "previous_response_id": None},
        ),
        ("POST", "/v1/messages", _CHAT),
        ("GET", "/v1/responses/resp-1?stream=true&starting_after=3", None),
        ("POST", "/v1/responses/resp-1/cancel", None),
        ("DELETE", "/v1/responses/resp-1", None),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("GET", "/health", None),
    ],
    "triton": [
        ("POST", "/v2/models/ensemble/generate", {"text_input": "x", "max_tokens": 4}),
        ("POST", "/v2/models/tensorrt_llm_bls/generate", {"text_input": "x", "max_tokens": 4}),
        ("POST", "/v2/models/tensorrt_llm/generate_stream", _TOKENS_IN),
        (
            "POST",
            "/v2/models/preprocessing/infer",
            {
                "inputs": [
                    {"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]},
                    {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1],
                     "data": [4]},
                ]
            },
        ),
        ("POST", "/v2/repository/index", {}),
        ("GET", "/v2/models/ensemble/config", None),
        ("GET", "/v2/health/ready", None),
    ],
    "metrics": [("GET", "/metrics", None)],
}  # fmt: skip
_NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, 2**31, 2**63, 2**200, "", "\0", "\ud800", "A" * 5000, [], {}, [[]],
    {"a": {"a": {}}}, [None] * 50, "%n%s", "../../etc/passwd", "é" * 100,
)  # fmt: skip
_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "X")
_HEADERS = (
    "Transfer-Encoding: chunked", "Content-Length: 5", "Content-Length: -1", "Connection: close",
    "Content-Encoding: gzip", "Inference-Header-Content-Length: 99999999", "Expect: 100-continue",
    "Host: evil.example", "Origin: http://evil.example", "Range: bytes=0-", "Upgrade: websocket",
    "Accept: text/event-stream", "Prefer: respond-async", "X: " + "y" * 20000, "Content-Type: x",
    "Upgrade: h2c", "Connection: content-type", "Connection: upgrade", "Content-Type: text/plain",
)  # fmt: skip


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request with a JSON body, that ends its connection."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


def _repeated(some: random.Random, size: int) -> bytes:
    """The beginning of a JSON token, and `size` bytes in which it does not end."""
    start, more = some.choice(list(_TOKENS.values()))
    return (start + more * (size // len(more))).encode()


_TOKENS = {
    "string": ('"', "a"),
    "escaped quotes": ("[" * 65 + '"', '\\"'),
    "backslashes": ('"', "\\\\"),
    "quotes and openings": ('"', '\\"['),
    "escapes": ('"', "\\u00"),
    "strings of one escape": ("[", '"\\'),
    "digits": ("[", "1"),
    "exponent": ("[1e", "1"),
    "literal": ("[", "tru"),
    "openings": ("", "["),
    "openings of both kinds": ("", '{"a":['),
    "keys": ("{", '"a":1,'),
    "commas": ("[", ","),
    "spaces": ("[1", " "),
}
"""Tokens of JSON that do not end: how each begins, and what it goes on with."""
_PARAMETERS = (
    *("classification", "binary_data", "binary_data_size", "shared_memory_region"),
    *("shared_memory_byte_size", "shared_memory_offset", "sequence_id", "sequence_start"),
    *("priority", "timeout", "triton_enable_empty_final_response", "headers", "unknown"),
)
JSON_PATHS = {
    "cog": "/predictions",
    "openai": "/v1/chat/completions",
    "triton": "/v2/models/ensemble/generate",
}


@dataclass(frozen=True, slots=True)
class Hostile:
    """One hostile input of a class: `data` for a port, whose answer comes within `seconds`."""

    kind: str
    name: str
    port: str
    data: bytes
    seconds: float = 4.0


def hostile(some: random.Random) -> Iterator[Hostile]:
    """Every input of the table, one after the other; most have a size of their class."""
    yield from _unterminated(some)
    yield from _bombs(some)


def _unterminated(some: random.Random) -> Iterator[Hostile]:
    """Tokens that do not end, in bodies that the server parses itself and that its child does."""
    for port, path in JSON_PATHS.items():
        for name, (start, more) in _TOKENS.items():
            for size in (some.randint(60_000, 65_000), some.randint(900_000, 1_000_000)):
                body = (start + more * (size // len(more))).encode()
                what = f"{name}, {size >> 10} KiB"
                yield Hostile("unterminated tokens", what, port, request("POST", path, body))


def _bombs(some: random.Random) -> Iterator[Hostile]:
    """Small requests whose work or memory is a product of their parts."""
    large = "a " * some.randint(48_000, 52_000)
    for field in ("{prompt}", "{prompt!a}", "{prompt!r}{system_prompt}"):
        count = some.randint(8_000, 10_000) if "!" in field else some.randint(28_000, 30_000)
        template = {"prompt": large, "prompt_template": field * count, "max_tokens": 4}
        yield _bomb("cog", f"{count} x {field}", {"input": template})
    chat, names = _CHAT, {"".join(some.choices("qxzvkj", k=16)): 1 for _ in range(15_000)}
    # Each is unknown, and logged until the log has many.
    yield _bomb("openai", "15000 unknown fields", {**chat, **names})
    yield _bomb("cog", "15000 unknown inputs", {"input": {"prompt": "x", "max_tokens": 4, **names}})
    for digits, count in ((4_000, 1_700), (6_000_000, 1)):
        numbers = "[" + ",".join(["9" * digits] * count) + "]"
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": numbers}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        what = f"{count} integers of {digits} digits in a call"
        yield _bomb("openai", what, {**chat, "messages": [*_MESSAGES, said]})
    wide = {"anyOf": [{"const": n} for n in range(9_000)]}
    many: tuple[tuple[str, dict[str, Any]], ...] = (
        ("stop strings", {"stop": ["a" * 2_000] * 4_000}),
        ("logit_bias", {"logit_bias": {str(n): 1 for n in range(30_000)}}),
        ("n", {"n": 10**9}),
        ("a pattern", {"structured_outputs": {"regex": "(a*)*" * 2_000 + "b"}}),
        ("a wide schema", _schema(wide)),
        ("a recursive schema", _schema({"$ref": "#"})),
    )
    for name, values in many:
        yield _bomb("openai", name, {**chat, **values})
    packed = gzip.compress(b" " * (100 << 20), 1, mtime=0)
    for port, path in JSON_PATHS.items():
        yield Hostile("bombs", "deep", port, request("POST", path, b"[" * 200_000))
        headers = "Content-Encoding: gzip"
        data = request("POST", path, packed, headers)
        yield Hostile("bombs", "100 MB of spaces in gzip", port, data)
    messages = b'{"input":{"messages":[%b0]}}' % (b"0," * 4_000_000)
    yield Hostile("bombs", "4 million messages", "cog", request("POST", "/predictions", messages))
    for port in PORTS:
        path = JSON_PATHS.get(port, "/metrics")
        data = request("POST", path, b"", "Transfer-Encoding: chunked") + b"1\r\n \r\n" * 1_000_000
        yield Hostile("bombs", "a million chunks", port, data + b"0\r\n\r\n", seconds=60)
        data = b"GET / HTTP/1.1\r\na: " + b"b" * (40 << 20)
        yield Hostile("bombs", "a header of 40 MB", port, data, seconds=60)


def _bomb(port: str, name: str, body: Any) -> Hostile:
    return Hostile(
        "bombs", name, port, request("POST", JSON_PATHS[port], json.dumps(body).encode())
    )


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"response_format": form}


class Inputs:
    """An endless supply, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> tuple[str, bytes]:
        """The name of a port, and what to send there."""
        some = self._random
        name = some.choices(PORTS, weights=(3, 3, 5, 1))[0]
        method, path, value = some.choice(_VALID[name])
        if value is not None and some.random() < 0.8:
            value = self._mutated(json.loads(json.dumps(value)))
        if name == "triton" and isinstance(value, dict) and some.random() < 0.2:
            odd = {some.choice(_PARAMETERS): copy.deepcopy(some.choice(_NASTY))}
            value = {**value, "parameters": odd}
        body = b"" if value is None else json.dumps(value).encode()
        if some.random() < 0.05:
            body = body[: some.randrange(len(body) + 1)] + _repeated(some, some.randrange(60_000))
        if some.random() < 0.1:
            method = some.choice(_METHODS)
        if some.random() < 0.1:
            path = some.choice(("//", "/..", "/%00", "/v2/../v2", path + "/x", path + "?a=b", "*"))
        headers = [some.choice(_HEADERS) for _ in range(some.choice((0, 0, 0, 1, 2)))]
        data = request(method, path, body, *headers)
        return name, self._damaged(data) if some.random() < 0.15 else data

    def _mutated(self, value: Any) -> Any:
        """`value` with one part replaced, removed or added, at any depth."""
        some = self._random
        if isinstance(value, dict) and value and some.random() < 0.85:
            key = some.choice(list(value))
            if some.random() < 0.1:
                del value[key]
            elif some.random() < 0.1:
                name = some.choice(("stream", "n", "stop", "id", "parameters", "x"))
                value[name] = copy.deepcopy(some.choice(_NASTY))
            else:
                value[key] = self._mutated(value[key])
            return value
        if isinstance(value, list) and value and some.random() < 0.7:
            index = some.randrange(len(value))
            value[index] = self._mutated(value[index])
            return value
        return copy.deepcopy(some.choice(_NASTY))  # it may be mutated, too

    def _damaged(self, data: bytes) -> bytes:
        """Bytes cut, flipped or doubled."""
        some = self._random
        at = some.randrange(len(data))
        kind = some.randrange(3)
        if kind == 0:
            return data[:at]
        if kind == 1:
            return data[:at] + bytes([some.randrange(256)]) + data[at + 1 :]
        return data[:at] + data[at:] * 2
