"""Log lines of requests: one shape for predictions, /v1, and Triton's own HTTP and gRPC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from stack import Stack, wait_until

from cog_triton.system.ports import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("mock")]

SECRET = "xyzzy"
CHAT = {"model": "mock", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}
SHAPE = {"timestamp", "level", "target", "event", "endpoint", "outcome", "prompt_tokens"} | {
    *("output_tokens", "queue_s", "ttft_s", "duration_s", "id")
}


def events(stack: Stack) -> list[dict[str, Any]]:
    """All events; every line but those of the command itself is a JSON object."""
    lines = [line for line in stack.output.splitlines() if line.startswith("{")]
    return [found for found in map(json.loads, lines) if "event" in found]


def events_of_an_idle(stack: Stack) -> list[dict[str, Any]]:
    """Those of earlier tests, which have all arrived."""
    wait_until(lambda: not stack.requests())
    return events(stack)


def newest(stack: Stack, before: int, count: int = 1) -> list[dict[str, Any]]:
    wait_until(lambda: len(events(stack)) >= before + count, 30)
    found = events(stack)[before:]
    assert len(found) == count, found
    assert SECRET not in json.dumps(found)
    return found


def by_grpc(stack: Stack) -> None:
    values = {
        "text_input": (np.array([[SECRET.encode()]], object), "BYTES"),
        "max_tokens": (np.array([[3]], np.int32), "INT32"),
        "stream": (np.array([[True]]), "BOOL"),
    }
    inputs = []
    for name, (value, kind) in values.items():
        inputs.append(tritonclient.grpc.InferInput(name, [*value.shape], kind))
        inputs[-1].set_data_from_numpy(value)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{stack.grpc}") as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("ensemble", inputs, request_id="own")
        client.stop_stream()


def ask(stack: Stack, api: str) -> None:
    body = {"text_input": SECRET, "max_tokens": 3, "id": "own"}
    ids = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 3, "id": "own"}
    if api == "grpc":
        by_grpc(stack)
        return
    url, sent = {
        "predictions": (f"{stack.url}/predictions", {"input": {"prompt": SECRET, "max_tokens": 3}}),
        "chat": (f"{stack.own}/v1/chat/completions", CHAT),
        "triton": (f"{stack.triton}/v2/models/ensemble/generate_stream", {**body, "stream": True}),
        "tokens": (f"{stack.triton}/v2/models/tensorrt_llm/generate", ids),
    }[api]
    httpx.post(url, json=sent, timeout=60).raise_for_status()


@pytest.mark.parametrize("api", ["predictions", "chat", "triton", "tokens", "grpc"])
def test_each_request_has_one_line_of_one_shape(mock: Stack, api: str) -> None:
    before = len(events_of_an_idle(mock))
    ask(mock, api)
    (line,) = newest(mock, before)
    of_triton = api not in ("predictions", "chat")
    assert line.keys() == SHAPE | ({"model"} if of_triton else set())
    assert (line["event"], line["outcome"], line["output_tokens"]) == ("request", "length", 3)
    assert line["prompt_tokens"] > 1
    assert 0 < line["ttft_s"] <= line["duration_s"]
    if of_triton:
        assert (line["endpoint"], line["id"]) == ("triton", "own")
        assert line["model"] == ("tensorrt_llm" if api == "tokens" else "ensemble")


@pytest.mark.parametrize(
    ("path", "sent", "field", "reason"),
    [
        ("/predictions", {"id": "own", "input": {"max_tokens": -3}}, "input.max_tokens", "-3 is"),
        ("/predictions", b'{"input": {', "body", "not JSON: "),
        ("/predictions", {"id": "own", "input": {"messages": SECRET}}, "input.messages", None),
        ("/v1/chat/completions", {**CHAT, "max_tokens": -3}, "max_tokens", "input should"),
        ("/v1/chat/completions", b'{"model', "body", "is not JSON: "),
        (
            *("/v2/models/ensemble/generate", {"text_input": SECRET, "max_tokens": -3}),
            *("max_tokens", "must be at least 1"),
        ),
        ("/v2/models/ensemble/generate", b'{"text_input":"xyzzy', "body", "not JSON: "),
        ("/v2/models/xyzzy/generate", {}, None, "Request for unknown model"),
    ],
)
def test_refused_ones_have_field_and_reason(
    mock: Stack, path: str, sent: Any, field: str | None, reason: str | None
) -> None:
    before = len(events_of_an_idle(mock))
    base = {"p": mock.url, "1": mock.own, "2": mock.triton}[path[1 if path[1] == "p" else 2]]
    content = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{base}{path}", content=content, headers=headers)
    assert answer.status_code in (400, 404, 422)
    (line,) = newest(mock, before)
    code = "E1009" if field is None else "E1005"
    assert code in answer.text
    assert (line["event"], line["code"], line.get("field")) == ("refused", code, field)
    assert line["reason"].startswith(reason or "")
    if path == "/predictions" and isinstance(sent, dict):
        assert line["id"] == "own"


def test_coglets_lines_are_told_apart_and_have_no_colours(mock: Stack) -> None:
    lines = mock.output.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    targets = {line["target"].partition("::")[0] for line in found}
    assert {"coglet", "cog_triton"} <= targets
    assert "\x1b" not in mock.output


@pytest.mark.full
def test_a_log_that_nobody_reads_holds_up_no_connection(tmp_path: Path) -> None:
    """Each refusal is a line of the server, on whose event loop all connections are."""
    port, openai, *others = free_ports(5)
    names = ("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT")
    own = dict(zip(names, map(str, others), strict=True)) | {"OPENAI_PORT": str(openai)}
    own |= {"COG_TRITON_API_KEY": "k", "COG_TRITON_WORK_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "cog_triton", "serve", "--engine", "mock", "--port", str(port)]
    with (
        subprocess.Popen(command, env={**os.environ, **own}, stderr=subprocess.PIPE) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{openai}", trust_env=False) as client,
    ):

        def ready() -> bool:
            with suppress(httpx.HTTPError):
                return client.get("/health").status_code == 200
            return False

        try:
            wait_until(ready, 60)
            statuses = {client.get("/v1/models", params={"a": "b" * 50}).status_code
                        for _ in range(1500)}  # fmt: skip
            assert statuses == {401}
            assert ready()
        finally:
            server.terminate()
            server.communicate(timeout=60)
