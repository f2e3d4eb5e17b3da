"""Scripts that others wrote: their requests against the real Triton, with the mock engine.

`tests/clients` has NVIDIA's. Text and pace of the mock are known; what a client makes of the
answers is what is looked at.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import Stack, text_of, wait_until

from cog_triton.engines.mock import mock_directory
from cog_triton.text.tokenizer import EngineTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))
import nvidia

pytestmark = [pytest.mark.integration, pytest.mark.full]

RELEASES = pytest.mark.parametrize("release", nvidia.RELEASES)
TEXT_MODELS = pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
PROMPTS = ["Hello there. ", "Good bye. "]
SIZE = 2000
"""Tokens of a request that is stopped: 40 s of them."""


@pytest.fixture(scope="module")
def says(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first 12 tokens of all that the mock says."""
    engine = mock_directory.make_engine(tmp_path_factory.mktemp("engines"))
    ids = mock_directory.read_model(engine).output_ids[:12]
    return str(EngineTokenizer.load(engine).tokenizer.decode(ids))


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Models that stream, which is the default."""
    stack = Stack(tmp_path_factory.mktemp("streaming"), None)
    stack.command += ["--engine", "mock", "--tps", "50"]
    with stack.served():
        yield stack


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Models with one response a request, as clients without streaming need them."""
    directory = tmp_path_factory.mktemp("whole")
    config = directory / "serve.yaml"
    config.write_text("tensorrt_llm: {args: {decoupled_mode: false}}")
    stack = Stack(directory / "work", None, COG_TRITON_CONFIG=str(config))
    stack.command += ["--engine", "mock", "--tps", "50"]
    with stack.served():
        yield stack


def grpc(stack: Stack) -> str:
    return f"127.0.0.1:{stack.grpc}"


def post(stack: Stack, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{stack.triton}/v2/models/{path}", json=body, timeout=60)


@RELEASES
def test_nvidias_token_client_streams_and_stops(release: str, streaming: Stack) -> None:
    names = ("output_ids", "sequence_length", "sequence_index")
    for outputs in ((), names):
        done = nvidia.ask_for_tokens(
            grpc(streaming), release, [5, 6, 7], 20, streaming=True, requested_outputs=outputs
        )
        assert (len(done.ids), done.errors) == (20, [])
    for cancel in (False, True):
        stopped = nvidia.ask_for_tokens(
            grpc(streaming),
            release,
            [5, 6, 7],
            SIZE,
            streaming=True,
            stop_after_s=2.0,
            stop_via_request_cancel=cancel,
        )
        assert 0 < len(stopped.ids) < SIZE
        assert cancel or stopped.errors == []
        wait_until(lambda: streaming.engine_requests() == 0)


@RELEASES
def test_nvidias_token_client_gets_whole_answers_and_stops(release: str, whole: Stack) -> None:
    def ask(size: int, **stop: Any) -> nvidia.TokenRun:
        return nvidia.ask_for_tokens(grpc(whole), release, [5, 6, 7], size, streaming=False, **stop)

    done = ask(20)
    assert (len(done.ids), done.responses, done.errors) == (23, 1, [])
    stopped = ask(SIZE, stop_after_s=2.0)
    assert (stopped.responses, stopped.stops_answered, stopped.errors) == (2, 1, [])
    assert 3 < len(stopped.ids) < SIZE
    cancelled = ask(SIZE, stop_after_s=2.0, stop_via_request_cancel=True)
    assert "CANCELLED" in cancelled.errors[0]
    wait_until(lambda: whole.engine_requests() == 0)


@TEXT_MODELS
@RELEASES
def test_nvidias_text_client_reads_all_answers(
    release: str, model: str, says: str, streaming: Stack, whole: Stack
) -> None:
    for stack in (streaming, whole):
        done = nvidia.ask_for_text(grpc(stack), release, PROMPTS, 12, model=model)
        assert (done.texts, done.errors) == ([prompt + says for prompt in PROMPTS], [])
    streamed = nvidia.ask_for_text(
        grpc(streaming), release, PROMPTS, 12, model=model, streaming=True
    )
    assert (streamed.texts, streamed.errors) == ([says, says], [])
    assert streamed.responses > 2


@TEXT_MODELS
@pytest.mark.parametrize("streams", [True, False])
def test_nvidias_text_client_sends_batches(
    streams: bool, model: str, says: str, streaming: Stack
) -> None:
    done = nvidia.ask_for_text(
        grpc(streaming),
        nvidia.NEWEST,
        PROMPTS,
        12,
        model=model,
        streaming=streams,
        batch_inputs=True,
        return_log_probs=True,
    )
    assert done.errors == []
    assert done.texts == [says if streams else prompt + says for prompt in PROMPTS]


def test_a_bad_prompt_of_a_batch_fails_it_and_leaves_the_engine_idle(streaming: Stack) -> None:
    done = nvidia.ask_for_text(
        grpc(streaming), nvidia.NEWEST, ["Hi", ""], SIZE, streaming=True, batch_inputs=True
    )
    assert "E1001" in done.errors[-1]
    wait_until(lambda: streaming.engine_requests() == 0)


def test_the_originals_scripts_find_what_they_read(
    says: str, streaming: Stack, whole: Stack
) -> None:
    """The requests of scripts/test_perf.py and scripts/benchmark.py of replicate/cog-triton."""
    sizes = {"max_tokens": 12, "min_length": 12}
    perf = {**sizes, "text_input": PROMPTS[0], "bad_words": [], "stop_words": []}
    benchmark = {**sizes, "bad_words": [""], "stop_words": [""], "temperature": 1.0}
    for stack in (streaming, whole):
        answer = post(stack, "ensemble/generate_stream", perf)
        assert len(json.loads(answer.text[len("data: ") :])["output_ids"]) > 12
        body = {"text_input": PROMPTS[0], "parameters": benchmark}
        found = post(stack, "ensemble/generate", body)
        assert found.json()["text_output"] == PROMPTS[0] + says


@TEXT_MODELS
def test_http_inference_is_stopped_by_its_id(model: str, whole: Stack) -> None:
    def infer(text: str, size: int, stop: bool) -> dict[str, Any]:
        tensors = [
            {"name": name, "shape": [1, 1], "datatype": kind, "data": [value]}
            for name, kind, value in (
                ("text_input", "BYTES", text),
                ("max_tokens", "INT32", size),
                ("stop", "BOOL", stop),
            )
        ]
        answer = post(whole, f"{model}/infer", {"id": "one", "inputs": tensors})
        return {output["name"]: output["data"] for output in answer.json()["outputs"]}

    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(infer(PROMPTS[0], SIZE, False)))
    asking.start()
    wait_until(lambda: whole.engine_requests() == 1)
    infer("", 1, True)
    asking.join(60)
    assert answers[0]["text_output"][0].startswith(PROMPTS[0])
    wait_until(lambda: whole.engine_requests() == 0)


def test_predictions_stream_beside_models_that_answer_whole(says: str, whole: Stack) -> None:
    with whole.stream("Hi", n_output_tokens=12) as events:
        chunks = [data["chunk"] for kind, data in events if kind == "output"]
    assert "".join(chunks) == says
    assert len(chunks) > 3
    assert text_of(whole.predict("Hi", n_output_tokens=12)) == says
