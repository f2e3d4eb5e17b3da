"""The mock engine behind the real Cog and the real Triton: how it breaks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_fixtures import MockText
from stack import REPOSITORY, Stack, predict, text_of, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.full]
FRAGILE = pytest.mark.xdist_group("fragile")
"""Of the tests that break one server, one after the other."""


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Started as the original's is, in its directory; for tests that break it."""
    stack = Stack(
        tmp_path_factory.mktemp("fragile"),
        None,
        COG_PREDICT_TYPE_STUB="predict.py:Predictor",
        COG_MAX_CONCURRENCY="32",
        MOCK_MAX_BATCH_SIZE="16",
        TRITON_TIMEOUT="30",  # longer than a machine that is busy leaves a stream without a token
        RESUME="0",
    )
    stack.command = [sys.executable, "-m", "cog.server.http", "--host", "127.0.0.1"]
    stack.cwd = REPOSITORY / "mock_cog_triton"
    stack.start()
    try:
        wait_until(lambda: stack.health() == "READY")
        yield stack
    finally:
        stack.close()


@FRAGILE
def test_a_hang_is_detected_and_the_engine_restarts(fragile: Stack, mock_text: MockText) -> None:
    hung = fragile.predict("Hi", tps=100, max_tokens=50, inject="hang", inject_after=10)
    assert "E2105 TritonUnavailable" in hung["error"]
    wait_until(lambda: "hangs: asleep for 2 s amid its work" in fragile.output)
    wait_until(lambda: fragile.health() == "READY")
    assert text_of(fragile.predict("Hi", tps=0, max_tokens=20)) == mock_text(20)


def test_the_mock_server_of_benchmarks(
    monkeypatch: pytest.MonkeyPatch, mock_text: MockText
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from _servers import mock_server

    with mock_server(environment={"MOCK_TOKENS_PER_RESPONSE": "4"}) as server:
        assert text_of(predict(server.url, n_output_tokens=64)) == mock_text(64)
        body = {"model": "mock", "prompt": "Hi", "max_tokens": 200}
        answer = httpx.post(f"{server.openai}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == mock_text(200)
        used = server.cpu_seconds()
        parts = {"cog", "worker", "tritonserver", "stub tensorrt_llm", "stub ensemble"}
        assert parts & used.keys() == {
            "cog",
            "worker",
            "tritonserver",
            "stub tensorrt_llm",
            "stub ensemble",
        }
        assert httpx.get(f"{server.openai}/v1/models", timeout=60).json()["data"][0]["id"] == "mock"
        pid, log = server.pid, server.log
    assert not Path(f"/proc/{pid}").exists()
    assert not log.exists()
