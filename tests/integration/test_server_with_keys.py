"""A server with keys: rights on each port, limits, what was used, and what ends no process."""

import json
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import Stack, processes_of, sse, start_times, text_of, wait_until
from webhook_receiver import CERTIFICATE, needs_tls

from cog_triton.cli.accounts import summed
from cog_triton.front.keyring import sha256_of

pytestmark = pytest.mark.integration

MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "0", "LOG_FORMAT": "json"}
MOCK["SERVED_MODEL_NAME"] = "m"
DEEP = b"[" * 200_000
ASK = {"input": {"prompt": "Hi there.", "max_tokens": 3}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi there."}], "max_tokens": 3}
LONG = {"messages": [{"role": "user", "content": "word " * 100}]}


def line(name: str, **values: Any) -> str:
    return json.dumps({"name": name, "sha256": sha256_of(f"key-{name}".encode()), **values})


LINES = [
    line("alpha", weight=2),
    line("small", requests_per_minute=3, max_prompt_tokens=40, concurrent=1),
    line("spent", tokens_per_minute=1),
    line("root", apis=["predictions", "openai", "triton", "metrics", "admin"]),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("tenants")
    (directory / "keys").mkdir()
    (directory / "keys" / "some").write_text("\n".join(LINES))
    keys = str(directory / "keys")
    with Stack(directory / "work", None, **MOCK, COG_TRITON_KEYS=keys).served() as stack:
        yield stack


def client(name: str) -> httpx.Client:
    return httpx.Client(headers={"authorization": f"Bearer key-{name}"}, timeout=60)


def chat(stack: Stack, name: str, **values: Any) -> httpx.Response:
    with client(name) as http:
        return http.post(f"{stack.own}/v1/chat/completions", json={**CHAT, **values})


def test_limits_are_told_with_value_and_rule_on_both_apis(served: Stack) -> None:
    many, long = chat(served, "small", n=2), chat(served, "small", **LONG)
    assert (many.status_code, many.headers["x-error-code"]) == (429, "E2107")
    assert "no more than 1 may (concurrent of its key)" in many.text
    assert "prompts of small may have 40 (max_prompt_tokens of its key)" in long.text
    with client("small") as http:
        asked = ({"input": {"prompt": "word " * 100}}, ASK)
        answers = [http.post(f"{served.url}/predictions", json=each).json() for each in asked]
    assert "may have 40 (max_prompt_tokens of its key)" in answers[0]["error"]
    assert "may have 3 requests a minute (requests_per_minute of its key)" in answers[1]["error"]
    late = chat(served, "small")
    assert late.status_code == 429
    assert 0 < int(late.headers["retry-after"]) <= 20
    assert chat(served, "spent").status_code == 200
    assert "may have 1 tokens a minute" in chat(served, "spent").text


def test_what_is_left_is_told_and_what_the_door_refused_is_counted(served: Stack) -> None:
    with client("alpha") as http:
        assert http.get(f"{served.own}/metrics").status_code == 403
    assert httpx.get(f"{served.own}/metrics").status_code == 401
    left = chat(served, "spent").headers
    assert (left["x-ratelimit-limit-tokens"], left["x-ratelimit-remaining-tokens"]) == ("1", "0")
    assert float(left["x-ratelimit-reset-tokens"].removesuffix("s")) > 60
    assert "x-ratelimit-limit-tokens" not in chat(served, "alpha").headers
    with client("root") as http:
        text = http.get(f"{served.own}/metrics").text
    for status, tenant in ((401, ""), (403, "alpha")):
        assert f'cog_triton_door_refused_total{{status="{status}",tenant="{tenant}"}} ' in text


def test_grpc_is_off_and_no_tokens_are_nobodys(served: Stack) -> None:
    with socket.socket() as found:
        assert found.connect_ex(("127.0.0.1", served.grpc)) != 0
    with client("alpha") as http:
        own = {**ASK, "context": {"cog-triton-tenant": '{"name":"root"}', "x": "y"}}
        assert http.put(f"{served.url}/predictions/a1", json=own).json()["status"] == "succeeded"
    used = summed(served.output.splitlines())
    assert used["alpha"]["output_tokens"] > 0
    assert not any(used[name]["output_tokens"] for name in ("-", "root") if name in used)


def test_keys_are_read_again_and_no_log_and_no_other_process_has_one(served: Stack) -> None:
    file = Path(served.environment["COG_TRITON_KEYS"]) / "more"
    file.write_text(line("gamma"))
    wait_until(lambda: chat(served, "gamma").status_code == 200, 30)
    file.write_text('{"name": "key-gamma"')
    wait_until(lambda: "the keys of before stay" in served.output, 30)
    assert chat(served, "gamma").status_code == 200
    file.unlink()
    wait_until(lambda: chat(served, "gamma").status_code == 401, 30)
    assert "key-" not in served.output
    for pid, program in processes_of(served.work_dir).items():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"key-alpha" not in environment
        parents = ("cog_triton serve", "front.server")
        assert (b"COG_TRITON_KEYS=" in environment) == any(one in program for one in parents)


@pytest.mark.parametrize(
    "body",
    [DEEP, b'{"a":' * 200_000, b'{"inputs":[],"outputs":[{"name":"OUTPUT","parameters":'
     b'{"classification":2147483647}}]}'],
)  # fmt: skip
def test_no_request_to_tritons_port_ends_a_process(served: Stack, body: bytes) -> None:
    before = start_times(served)
    with client("root") as http:
        for path in (
            "/v2/models/tensorrt_llm/generate",
            "/v2/models/tensorrt_llm/infer",
            "/v2/models/postprocessing/infer",
            "/v2/repository/index",
            "/v2/logging",
            "/v2/trace/setting",
            "/v2/systemsharedmemory/region/evil/register",
        ):
            answer = http.post(f"{served.triton}{path}", content=body)
            assert answer.status_code in (200, 400, 404), (path, answer.text)
        assert text_of(http.post(f"{served.url}/predictions", json=ASK).json())
    assert start_times(served).items() >= before.items()


def test_a_million_chunks_end_no_process(served: Stack) -> None:
    before = start_times(served)
    head = b"POST /v2/models/tensorrt_llm/generate HTTP/1.1\r\nhost: localhost\r\n"
    head += b"authorization: Bearer key-root\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.http), timeout=60) as sock:
        sock.sendall(head + b"1\r\n \r\n" * 1_000_000 + b"2\r\n{}\r\n0\r\n\r\n")
        assert b"HTTP/1.1 400" in sock.recv(100)
    assert start_times(served).items() >= before.items()


@pytest.mark.full
@needs_tls
def test_all_ports_have_tls_and_the_server_watches_itself_through_it(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "work", None, **MOCK, TLS_CERT_FILE=str(CERTIFICATE))
    trusted = ssl.create_default_context(cafile=CERTIFICATE)
    ports = (stack.port, stack.openai, stack.http, stack.metrics)
    cog, openai, triton, metrics = (f"https://localhost:{port}" for port in ports)
    try:
        stack.start()
        wait_until(lambda: "Ready in" in stack.output)
        with httpx.Client(verify=trusted, timeout=60) as http:
            asked = http.post(
                f"{cog}/predictions", json=ASK, headers={"accept": "text/event-stream"}
            )
            assert [event for event, _ in sse(iter(asked.text.splitlines()))][-1] == "completed"
            chat = http.post(f"{openai}/v1/chat/completions", json={**CHAT, "stream": True})
            assert chat.text.endswith("data: [DONE]\n\n")
            assert http.get(f"{triton}/v2").status_code == 200
            assert http.get(f"{metrics}/metrics").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{stack.port}/health-check")
        code, output = stack.finish(signal.SIGTERM)
        assert (code, "E2105" in output) == (0, False)
    finally:
        stack.close()
