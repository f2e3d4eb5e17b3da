"""Tenants before the real Cog and Triton: keys on each port, limits, and what was used."""

import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import Stack, processes_of, sse, wait_until

from cog_triton.cli.usage import summed
from cog_triton.door.keyring import sha256_of

pytestmark = pytest.mark.integration

MOCK = {
    "COG_TRITON_ENGINE": "mock",
    "MOCK_TPS": "0",
    "LOG_FORMAT": "json",
    "SERVED_MODEL_NAME": "cog-triton",
}
ASK = {"input": {"prompt": "Hi there.", "max_tokens": 3}}
CHAT = {
    "model": "cog-triton",
    "messages": [{"role": "user", "content": "Hi there."}],
    "max_tokens": 3,
}

LONG = {"messages": [{"role": "user", "content": "word " * 100}]}


def line(name: str, **values: Any) -> str:
    return json.dumps({"name": name, "sha256": sha256_of(f"key-{name}".encode()), **values})


LINES = [
    line("alpha", weight=2),
    line("beta", apis=["openai"], models=["other"]),
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


def test_both_apis_answer_a_tenant_and_no_other(served: Stack) -> None:
    with client("alpha") as http:
        assert http.post(f"{served.url}/predictions", json=ASK).json()["status"] == "succeeded"
        own = {**ASK, "context": {"cog-triton-tenant": '{"name":"root"}', "x": "y"}}
        assert http.put(f"{served.url}/predictions/a1", json=own).json()["status"] == "succeeded"
        headers = {"accept": "text/event-stream"}
        with http.stream("POST", f"{served.url}/predictions", json=ASK, headers=headers) as answer:
            events = [event for event, _ in sse(answer.iter_lines())]
        assert (events[0], events[-1]) == ("start", "completed")
        assert http.get(f"{served.triton}/v2").status_code == 403
    assert chat(served, "alpha").status_code == 200
    assert chat(served, "nobody").status_code == 401
    refusal = httpx.post(f"{served.url}/predictions", json=ASK)
    assert (refusal.status_code, refusal.json()["error"][:5]) == (401, "E1007")


def test_a_tenant_has_the_models_of_its_key_alone(served: Stack) -> None:
    refusal = chat(served, "beta")
    assert (refusal.status_code, refusal.headers["x-error-code"]) == (404, "E1009")
    assert "the key of beta is not for it" in refusal.json()["error"]["message"]


def test_limits_are_told_with_value_and_rule_on_both_apis(served: Stack) -> None:
    refusals = [chat(served, "small", n=2), chat(served, "small", **LONG)]
    assert [(each.status_code, each.headers["x-error-code"]) for each in refusals] == [
        (429, "E2107"),
        (400, "E1002"),
    ]
    assert "no more than 1 may (concurrent of its key)" in refusals[0].text
    assert "prompts of small may have 40 (max_prompt_tokens of its key)" in refusals[1].text
    with client("small") as http:
        long = {"input": {"prompt": "word " * 100}}
        answers = [http.post(f"{served.url}/predictions", json=each).json() for each in (long, ASK)]
    assert "may have 40 (max_prompt_tokens of its key)" in answers[0]["error"]
    assert "may have 3 requests a minute (requests_per_minute of its key)" in answers[1]["error"]
    late = chat(served, "small")
    assert late.status_code == 429
    assert 0 < int(late.headers["retry-after"]) <= 20
    assert chat(served, "spent").status_code == 200
    assert "may have 1 tokens a minute" in chat(served, "spent").text


def test_what_is_left_is_told_and_what_the_door_refused_is_counted(served: Stack) -> None:
    left = chat(served, "spent").headers
    assert (left["x-ratelimit-limit-tokens"], left["x-ratelimit-remaining-tokens"]) == ("1", "0")
    assert float(left["x-ratelimit-reset-tokens"].removesuffix("s")) > 60
    assert "x-ratelimit-limit-tokens" not in chat(served, "alpha").headers
    with client("root") as http:
        text = http.get(f"{served.own}/metrics").text
    for status, tenant in ((401, ""), (403, "alpha")):
        assert f'cog_triton_door_refused_total{{status="{status}",tenant="{tenant}"}} ' in text


def test_rights_open_tritons_port_and_grpc_is_off(served: Stack) -> None:
    with client("root") as http:
        assert http.get(f"{served.triton}/v2").status_code == 200
    with socket.socket() as found:
        assert found.connect_ex(("127.0.0.1", served.grpc)) != 0


def test_what_tenants_used_is_in_metrics_and_in_the_log(served: Stack) -> None:
    assert chat(served, "alpha").status_code == 200
    with client("alpha") as http:
        http.post(f"{served.url}/predictions", json=ASK)
        assert http.get(f"{served.own}/metrics").status_code == 403
    with client("root") as http:
        metrics = http.get(f"{served.own}/metrics").text
    labels = r'\{outcome="length",tenant="alpha"\}'
    found = re.findall(rf"cog_triton_tenant_requests_total{labels} (.*)", metrics)
    assert float(found[0]) >= 2
    used = summed(served.output.splitlines())
    assert used["alpha"]["requests"] == float(found[0])
    assert used["alpha"]["output_tokens"] == 3 * float(found[0])
    assert "-" not in used or not used["-"]["output_tokens"]


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
    for pid in processes_of(served.work_dir):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"key-alpha" not in environment
        if b"COG_TRITON_TENANTS_AT_DOOR=true" in environment:
            assert b"COG_TRITON_KEYS=" not in environment


def test_a_worker_without_a_door_refuses_keys(tmp_path: Path) -> None:
    from cog_triton.errors import InvalidArgument
    from cog_triton.serving.openai.listeners import HTTPListeners
    from cog_triton.serving.telemetry.observers import CompositeObserver
    from cog_triton.settings import load_settings

    settings = load_settings(cog_triton_keys=tmp_path)
    with pytest.raises(InvalidArgument, match="is for the front door"):
        HTTPListeners(settings, CompositeObserver(settings))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl, which makes certificates")
def test_all_ports_have_tls_and_the_server_watches_itself_through_it(tmp_path: Path) -> None:
    chain = tmp_path / "both.pem"
    command = "openssl req -x509 -nodes -days 2 -newkey rsa:2048 -addext"
    command += (
        f" subjectAltName=DNS:localhost -subj /CN=localhost -keyout {chain} -out {tmp_path}/c"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    chain.write_bytes(chain.read_bytes() + (tmp_path / "c").read_bytes())
    stack = Stack(tmp_path / "work", None, **MOCK, TLS_CERT_FILE=str(chain), COG_PROBE_PERIOD="0.2")
    trusted = ssl.create_default_context(cafile=tmp_path / "c")
    try:
        stack.start()
        wait_until(lambda: "Ready in" in stack.output)
        with httpx.Client(verify=trusted, timeout=60) as http:
            answer = http.post(f"https://localhost:{stack.port}/predictions", json=ASK)
            assert answer.json()["status"] == "succeeded"
            headers = {"accept": "text/event-stream"}
            url = f"https://localhost:{stack.port}/predictions"
            with http.stream("POST", url, json=ASK, headers=headers) as events:
                assert [event for event, _ in sse(events.iter_lines())][-1] == "completed"
            streamed = http.post(
                f"https://localhost:{stack.openai}/v1/chat/completions",
                json={**CHAT, "stream": True},
            )
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert http.get(f"https://localhost:{stack.http}/v2").status_code == 200
            assert (
                "cog_triton_ready 1.0" in http.get(f"https://localhost:{stack.openai}/metrics").text
            )
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{stack.port}/health-check")
        code, output = stack.finish(signal.SIGTERM)
        assert (code, "E2105" in output) == (0, False)
    finally:
        stack.close()
