"""Hostile requests: mutations of valid ones, as bytes, from a random seed."""

from __future__ import annotations

import json
import random
from typing import Any

PORTS = ("cog", "openai", "triton", "metrics")
_VALID: dict[str, list[tuple[str, str, Any]]] = {
    "cog": [
        ("POST", "/predictions", {"input": {"prompt": "rivers", "max_tokens": 4}}),
        ("PUT", "/predictions/abc", {"input": {"prompt": "rivers", "max_tokens": 4}}),
        ("POST", "/predictions/abc/cancel", None),
        ("GET", "/health-check", None),
        ("GET", "/openapi.json", None),
    ],
    "openai": [
        (
            "POST",
            "/v1/chat/completions",
            {"model": "mock", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]},
        ),
        ("POST", "/v1/completions", {"model": "mock", "prompt": "x", "max_tokens": 4}),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("GET", "/health", None),
    ],
    "triton": [
        ("POST", "/v2/models/ensemble/generate", {"text_input": "x", "max_tokens": 4}),
        ("POST", "/v2/models/tensorrt_llm_bls/generate", {"text_input": "x", "max_tokens": 4}),
        (
            "POST",
            "/v2/models/tensorrt_llm/generate_stream",
            {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 4, "streaming": True},
        ),
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
)  # fmt: skip


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request with a JSON body, that ends its connection."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


def deep(levels: int) -> bytes:
    """JSON that is nothing but nested."""
    return b"[" * levels


def chunked(path: str, count: int) -> bytes:
    """A body of `count` chunks of one byte."""
    head = request("POST", path, b"", "Transfer-Encoding: chunked")
    return head + b"1\r\n \r\n" * count + b"0\r\n\r\n"


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
        body = b"" if value is None else json.dumps(value).encode()
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
                value[some.choice(("stream", "n", "stop", "id", "parameters", "x"))] = some.choice(
                    _NASTY
                )
            else:
                value[key] = self._mutated(value[key])
            return value
        if isinstance(value, list) and value and some.random() < 0.7:
            index = some.randrange(len(value))
            value[index] = self._mutated(value[index])
            return value
        return some.choice(_NASTY)

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
