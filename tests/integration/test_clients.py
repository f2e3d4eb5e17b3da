"""Clients that others wrote: their requests against the real Triton, with the mock engine.

`tests/clients` has them. Text and pace of the mock are known; what a client makes of the answers is
what is looked at.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from stack import Stack, text_of, wait_until

from cog_triton.engines.mock import mock_directory
from cog_triton.text.tokenizer import EngineTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))
import end_to_end
import http_infer
import inflight_batcher
import original_scripts

pytestmark = pytest.mark.integration

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


@pytest.mark.parametrize("release", inflight_batcher.RELEASES)
def test_nvidias_token_client_streams_and_stops(release: str, streaming: Stack) -> None:
    done = inflight_batcher.run(grpc(streaming), release, [5, 6, 7], 20, streaming=True)
    assert (len(done.ids), done.errors) == (20, [])
    for cancel in (False, True):
        stopped = inflight_batcher.run(
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


@pytest.mark.parametrize("release", inflight_batcher.RELEASES)
def test_nvidias_token_client_gets_whole_answers_and_stops(release: str, whole: Stack) -> None:
    done = inflight_batcher.run(grpc(whole), release, [5, 6, 7], 20, streaming=False)
    assert (len(done.ids), done.responses, done.errors) == (23, 1, [])
    stopped = inflight_batcher.run(
        grpc(whole), release, [5, 6, 7], SIZE, streaming=False, stop_after_s=2.0
    )
    assert (stopped.responses, stopped.stops_answered, stopped.errors) == (2, 1, [])
    assert 3 < len(stopped.ids) < SIZE
    cancelled = inflight_batcher.run(
        grpc(whole),
        release,
        [5, 6, 7],
        SIZE,
        streaming=False,
        stop_after_s=2.0,
        stop_via_request_cancel=True,
    )
    assert "CANCELLED" in cancelled.errors[0]
    wait_until(lambda: whole.engine_requests() == 0)


def test_nvidias_token_client_gets_just_the_outputs_that_it_asks_for(
    streaming: Stack, whole: Stack
) -> None:
    names = ("output_ids", "sequence_length", "sequence_index")
    for stack, streams in ((streaming, True), (whole, False)):
        done = inflight_batcher.run(
            grpc(stack), "0.19.0", [5], 3, streaming=streams, requested_outputs=names
        )
        assert done.errors == []


@TEXT_MODELS
@pytest.mark.parametrize("release", end_to_end.RELEASES)
def test_nvidias_text_client_reads_all_answers(
    release: str, model: str, says: str, streaming: Stack, whole: Stack
) -> None:
    for stack in (streaming, whole):
        done = end_to_end.run(grpc(stack), release, PROMPTS, 12, model=model)
        assert (done.texts, done.errors) == ([prompt + says for prompt in PROMPTS], [])
    streamed = end_to_end.run(grpc(streaming), release, PROMPTS, 12, model=model, streaming=True)
    assert (streamed.texts, streamed.errors) == ([says, says], [])
    assert streamed.responses > 2


@TEXT_MODELS
@pytest.mark.parametrize("release", ["0.12.0", "0.19.0"])
def test_nvidias_text_client_sends_batches(
    release: str, model: str, says: str, streaming: Stack
) -> None:
    for streams in (True, False):
        done = end_to_end.run(
            grpc(streaming),
            release,
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
    done = end_to_end.run(
        grpc(streaming), "0.19.0", ["Hi", ""], SIZE, streaming=True, batch_inputs=True
    )
    assert "E1001" in done.errors[-1]
    wait_until(lambda: streaming.engine_requests() == 0)


def test_batches_of_token_ids_are_refused_by_a_word_about_them(whole: Stack) -> None:
    body = {
        "inputs": [
            {"name": name, "shape": [2, 1], "datatype": "INT32", "data": [3, 3]}
            for name in ("input_ids", "input_lengths", "request_output_len")
        ]
    }
    answer = httpx.post(f"{whole.triton}/v2/models/tensorrt_llm/infer", json=body, timeout=60)
    assert answer.status_code == 400
    assert "a batch of 2 prompts: send a request for each" in answer.json()["error"]


def test_the_originals_scripts_find_what_they_read(
    says: str, streaming: Stack, whole: Stack
) -> None:
    for stack in (streaming, whole):
        ids = original_scripts.perf_request(stack.triton, PROMPTS[0], 12)
        assert len(ids) > 12
        text = original_scripts.benchmark_request(stack.triton, PROMPTS[0], 12)
        assert text == PROMPTS[0] + says


@TEXT_MODELS
def test_http_inference_answers_whole_and_is_stopped_by_its_id(
    model: str, says: str, whole: Stack
) -> None:
    values = {"text_input": PROMPTS[0], "bad_words": "", "stop_words": ""}
    found = http_infer.infer(whole.triton, model, **values, max_tokens=12)
    assert found["text_output"] == [PROMPTS[0] + says]
    answers = []

    def ask() -> None:
        answers.append(http_infer.infer(whole.triton, model, "one", **values, max_tokens=SIZE))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: whole.engine_requests() == 1)
    http_infer.infer(whole.triton, model, "one", text_input="", max_tokens=1, stop=True)
    asking.join(60)
    assert answers[0]["text_output"][0].startswith(PROMPTS[0])
    wait_until(lambda: whole.engine_requests() == 0)


def test_what_cannot_stream_says_so(streaming: Stack, whole: Stack) -> None:
    with pytest.raises(RuntimeError, match=r"E1005 .*decoupled.*decoupled_mode: false"):
        http_infer.infer(streaming.triton, "ensemble", text_input="Hi", max_tokens=2)
    with pytest.raises(RuntimeError, match=r"E1005 .*stream=True.*decoupled_mode is false"):
        http_infer.infer(whole.triton, "ensemble", text_input="Hi", max_tokens=2, stream=True)
    with pytest.raises(RuntimeError, match=r"E1005 .*Streaming is only supported"):
        http_infer.infer(
            whole.triton,
            "tensorrt_llm",
            input_ids=[1],
            input_lengths=1,
            request_output_len=2,
            streaming=True,
        )


def test_predictions_stream_beside_models_that_answer_whole(says: str, whole: Stack) -> None:
    with whole.stream("Hi", n_output_tokens=12) as events:
        chunks = [data["chunk"] for kind, data in events if kind == "output"]
    assert "".join(chunks) == says
    assert len(chunks) > 3
    assert text_of(whole.predict("Hi", n_output_tokens=12)) == says
