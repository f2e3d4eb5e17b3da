"""Triton, our models and the double of vLLM, reached as the users of vllm_backend reach theirs."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc
from stack import pid_of, text_of, wait_until
from step_client import StepClient, private_ends
from vllm_engines import calls
from vllm_stack import VLLMStack

from cog_triton.engines import engine_messages
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import CANCELLED, LENGTH
from cog_triton.text.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))
import vllm_sample

pytestmark = pytest.mark.integration

QUESTION = "What is Triton Inference Server?"


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMStack]:
    stack = VLLMStack(tmp_path_factory.mktemp("vllm"))
    with stack.served():
        yield stack


def test_the_curl_line_of_vllm_backend_answers(vllm: VLLMStack) -> None:
    body = f'{{"text_input": "{QUESTION}", "parameters": {{"stream": false, "temperature": 0}}}}'
    url = f"{vllm.triton}/v2/models/vllm_model/generate"
    # As curl sends it: with the content type of a form.
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(url, content=body, headers=headers, timeout=30)
    assert answer.json() == {
        "model_name": "vllm_model",
        "model_version": "1",
        "text_output": QUESTION + QUESTION[:16],
    }
    assert calls(vllm.journal, "add_request")[-1]["params"]["temperature"] == 0


def started(pid: int) -> int:
    """When a process was started, in ticks since the machine was."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_the_engine_loads_while_triton_starts(vllm: VLLMStack) -> None:
    """There is one engine; its caches are in place."""
    assert [log.name for log in vllm.work_dir.glob("run/*/engine-*.log")] == ["engine-1.log"]
    of_engine, of_stub = (
        started(pid_of(vllm, word))
        for word in ("cog_triton.backend.engine_process", "/tensorrt_llm/1/model.py")
    )
    assert of_engine < of_stub
    (told,) = calls(vllm.journal, "engine_core")[:1]
    (root,) = (vllm.work_dir / "compiler-caches").iterdir()
    assert told["environment"]["TRITON_CACHE_DIR"] == str(root / "triton")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("release", vllm_sample.RELEASES)
def test_the_sample_client_of_vllm_backend_gets_its_texts(
    vllm: VLLMStack, release: str, streaming: bool
) -> None:
    prompts = ["Hello, my name is\n", "The most dangerous animal is\n"]
    found = vllm_sample.run(
        f"127.0.0.1:{vllm.grpc}",
        release,
        prompts,
        streaming=streaming,
        exclude_input_in_output=streaming,
    )
    size = 16 if release == "23.10" else 100  # vLLM's default, or what the client asks for
    generated = [(prompt * 10)[:size] for prompt in prompts]
    texts = [text if streaming else p + text for p, text in zip(prompts, generated, strict=True)]
    assert found == {str(place): text for place, text in enumerate(texts)}


def test_text_streams_over_http(vllm: VLLMStack) -> None:
    events = vllm.events(
        text_input="größer ",
        stream=True,
        sampling_parameters='{"max_tokens": 18}',
        return_finish_reason=True,
        return_num_output_tokens=True,
        return_num_input_tokens=True,
    )
    assert "".join(event["text_output"] for event in events) == "größer größer "
    *others, last = [event["finish_reason"] for event in events]
    assert last == "length"
    assert set(others) <= {"None"}
    assert sum(event["num_output_tokens"] for event in events) == 18
    assert {event["num_input_tokens"] for event in events} == {9}


def test_all_outputs_can_be_requested(vllm: VLLMStack) -> None:
    body = vllm.generate(
        text_input="ab",
        sampling_parameters='{"n": 2, "max_tokens": 2, "logprobs": 1}',
        exclude_input_in_output=True,
        **{
            f"return_{name}": True
            for name in (
                "finish_reason",
                "cumulative_logprob",
                "logprobs",
                "num_input_tokens",
                "num_output_tokens",
            )
        },
    )
    assert body["text_output"] == ["ab", "ba"]
    assert body["finish_reason"] == ["length", "length"]
    assert body["cumulative_logprob"] == [-0.375, -0.375]
    assert (body["num_input_tokens"], body["num_output_tokens"]) == (2, [2, 2])
    assert json.loads(body["logprobs"][1])[0]["98"]["logprob"] == -0.125


def test_additional_outputs_over_grpc(vllm: VLLMStack) -> None:
    """The example in vllm_backend's docs/additional_outputs.md."""
    inputs = [grpc.InferInput("text_input", [1], "BYTES")]
    inputs[-1].set_data_from_numpy(np.array([b"example prompt"], dtype=np.object_))
    inputs.append(grpc.InferInput("return_finish_reason", [1], "BOOL"))
    inputs[-1].set_data_from_numpy(np.array([True], dtype=bool))
    got: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(f"127.0.0.1:{vllm.grpc}") as client:
        client.start_stream(lambda result, error: got.put((result, error)))
        client.async_stream_infer("vllm_model", inputs=inputs)
        result, error = got.get(timeout=60)
        assert error is None
        assert result.as_numpy(name="finish_reason").tolist() == [b"length"]
        client.stop_stream()


def test_structured_outputs_and_adapters(vllm: VLLMStack) -> None:
    sampling = {"structured_outputs": {"choice": ["yes", "no"]}, "lora_name": "doll"}
    body = vllm.generate(
        text_input="?", exclude_input_in_output=True, sampling_parameters=json.dumps(sampling)
    )
    assert body["text_output"] == "yes"
    assert calls(vllm.journal, "add_request")[-1]["lora"] == "doll"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temprature": 1}, "E1005 InvalidArgument: temprature: unknown input or sampling"),
        ({"sampling_parameters": '{"top_q": 1}'}, "did you mean 'top_p'"),
        ({"sampling_parameters": "{"}, "E1005 InvalidArgument: sampling_parameters: not JSON"),
        ({"parameters": {"temperature": 9.5}}, "Error generating stream: E1005 InvalidArgument"),
        ({"stream": True, "exclude_input_in_output": False}, "= False is not allowed."),
        ({"sampling_parameters": '{"lora_name": "sql"}'}, "LoRA sql is not supported, we"),
        ({"image": "aGk="}, "E1005 InvalidArgument: image"),
        ({"text_input": ""}, "E1001 PromptRequired"),
        ({"text_input": "x" * 5000}, "E1002 PromptTooLong"),
        ({"text_input": "break the request"}, "E2200 VLLMUnknownError: RuntimeError: CUDA error"),
    ],
)
def test_errors_are_in_the_response(vllm: VLLMStack, values: dict[str, Any], words: str) -> None:
    if values.get("stream"):
        (body,) = vllm.events(**{"text_input": "Hello", **values})
    else:
        response = httpx.post(
            f"{vllm.triton}/v2/models/vllm_model/generate", json={"text_input": "Hello", **values}
        )
        assert response.status_code >= 400
        body = response.json()
    assert words in body["error"]


def test_both_apis_select_an_adapter_by_name(vllm: VLLMStack) -> None:
    (base, adapted) = httpx.get(f"{vllm.own}/v1/models", timeout=60).json()["data"]
    assert (adapted["id"], adapted["parent"]) == ("doll", base["id"])
    body = {"model": "doll", "prompt": "ab", "max_tokens": 3}
    answer = httpx.post(f"{vllm.own}/v1/completions", json=body, timeout=60).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("doll", "aba")
    assert calls(vllm.journal, "add_request")[-1]["lora"] == "doll"
    assert text_of(vllm.predict("ab", max_tokens=3, lora_name="doll", prompt_template="{prompt}"))
    assert calls(vllm.journal, "add_request")[-1]["lora"] == "doll"
    assert len(calls(vllm.journal, "add_lora")) == 1


def test_a_disconnected_clients_request_is_aborted(vllm: VLLMStack) -> None:
    url = f"{vllm.triton}/v2/models/vllm_model/generate_stream"
    values = {"text_input": "abc", "stream": True, "parameters": {"max_tokens": 4000}}
    with httpx.stream("POST", url, json=values) as response:
        next(response.iter_raw())
    name = calls(vllm.journal, "add_request")[-1]["id"]

    def aborted() -> bool:
        """By its name, or by vLLM's internal one, which adds to it, when its task ends first."""
        ids = [one for abort in calls(vllm.journal, "abort") for one in abort["ids"]]
        return any(one == name or one.startswith(f"{name}-") for one in ids)

    wait_until(aborted)
    wait_until(lambda: "model=vllm_model outcome=cancelled" in vllm.output)
    vllm.generate(text_input="abc", parameters={"max_tokens": 4})
    made = r" model=vllm_model outcome=length prompt_tokens=\d+ output_tokens=4 "
    wait_until(lambda: re.search(made, vllm.output))


def test_predictions_are_served_by_the_same_engine(vllm: VLLMStack) -> None:
    done = vllm.predict("What is machine", max_tokens=20, prompt_template="{prompt}")
    assert text_of(done) == "What is machineWhat "


def test_usage_has_the_tokens_that_the_engine_had_cached(vllm: VLLMStack) -> None:
    served = httpx.get(f"{vllm.own}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": served, "prompt": "a prompt of two whole blocks, or more", "max_tokens": 2}
    found = [httpx.post(f"{vllm.own}/v1/completions", json=body, timeout=60) for _ in range(2)]
    first, second = (answer.json()["usage"] for answer in found)
    assert "prompt_tokens_details" not in first
    assert second["prompt_tokens_details"] == {"cached_tokens": 32}
    wait_until(lambda: " cached_tokens=32 " in vllm.output)


def submit(client: StepClient, handle: int, count: int, prompt: bytes, **sampling: float) -> None:
    request = EngineRequest(
        input_ids=list(prompt),
        sampling=SamplingParams(max_tokens=count, **sampling),  # type: ignore[arg-type]
        return_log_probs=count == 1,
        end_id=-1,
    )
    client.send(engine_messages.submit(handle, request))


def test_engine_steps_carry_sixteen_streams_together(vllm: VLLMStack) -> None:
    target, _, key = private_ends(vllm)
    client = StepClient(target, key).until_open()
    aborted = len(calls(vllm.journal, "abort"))
    prompt = b"every token in order "
    try:
        vllm.hold.touch()
        added = len(calls(vllm.journal, "add_request"))
        submit(client, 17, 4000, prompt)
        for handle in range(16):
            submit(client, handle, 200 + handle, prompt)
        wait_until(lambda: len(calls(vllm.journal, "add_request")) == added + 17)
        vllm.hold.unlink()
        client.cancel(17)
        text = vllm.generate(text_input="text beside it", parameters={"max_tokens": 9})
        for handle in range(16):
            assert client.until_ended(handle).end == LENGTH
            assert bytes(client.ids[handle]) == (prompt * 11)[: 200 + handle]
        assert text["text_output"] == "text beside it" + "text besi"
        assert client.widest >= 16, "steps do not share responses"
        assert client.until_ended(17).end == CANCELLED
        assert bytes(client.ids[17]) == (prompt * 200)[: len(client.ids[17])]
        wait_until(lambda: len(calls(vllm.journal, "abort")) > aborted)
        submit(client, 18, 1, b"a" * 4096)
        assert str(client.until_ended(18).error).startswith("E1002")
        submit(client, 19, 2, b"a", temperature=3.0, top_p=0.5)
        assert str(client.until_ended(19).error).startswith("E1005")
        submit(client, 99, 1, b"abc")
        assert client.until_ended(99).log_probs == [-0.125]
    finally:
        client.close()


def test_a_prediction_beyond_max_model_len_is_refused(vllm: VLLMStack) -> None:
    done = vllm.predict("x" * 5000, prompt_template="{prompt}")
    assert "E1002" in done["error"]


def test_ensemble_and_bls_work_on_a_vllm_engine(vllm: VLLMStack) -> None:
    for model in ("ensemble", "tensorrt_llm_bls"):
        response = httpx.post(
            f"{vllm.triton}/v2/models/{model}/generate",
            json={"text_input": "abc", "max_tokens": 5, "bad_words": ["bc"], "stop_words": ["dab"]},
            timeout=30,
        )
        assert response.status_code == 200, response.text
        assert response.json()["text_output"] == "abcab"


def test_platforms_read_the_kv_cache_of_vllm(vllm: VLLMStack) -> None:
    def counts() -> tuple[float, float]:
        lines = httpx.get(f"{vllm.own}/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        (config,) = (name for name in values if name.startswith("vllm:cache_config_info{"))
        assert 'block_size="16"' in config
        assert 'num_gpu_blocks="1024"' in config
        queries, hits = (
            next(value for name, value in values.items() if name.startswith(f"vllm:{wanted}_total"))
            for wanted in ("prefix_cache_queries", "prefix_cache_hits")
        )
        return float(queries), float(hits)

    hits = -1.0
    while hits != (hits := counts()[1]):  # those of earlier requests have arrived
        time.sleep(2)
    queries = counts()[0]
    for _ in range(2):
        vllm.generate(text_input="a prompt of 32 bytes, no other's", parameters={"max_tokens": 4})
    wait_until(lambda: counts() == (queries + 64, hits + 32))


def test_the_engine_is_configured_by_model_json(vllm: VLLMStack) -> None:
    (opened,) = calls(vllm.journal, "open")
    assert (opened["max_model_len"], opened["enable_lora"]) == (4096, True)


def test_a_model_that_does_not_load_reports_its_error(tmp_path: Path) -> None:
    stack = VLLMStack(tmp_path)
    (tmp_path / "engine" / "model.json").write_text(
        '{"model": "../weights", "gpu_memory_utilization": 1.5}'
    )
    stack.start()
    try:
        code, output = stack.finish()
    finally:
        stack.close()
    assert code != 0
    assert "E1202 InvalidPredictorConfig: model.json: vLLM refuses it" in output


@pytest.mark.full
def test_an_unknown_engine_argument_is_refused_before_triton_starts(tmp_path: Path) -> None:
    stack = VLLMStack(tmp_path)
    (tmp_path / "engine" / "model.json").write_text('{"disable_log_requests": true}')
    stack.start()
    code, output = stack.finish()
    assert code != 0
    assert "E1201 UnexpectedEngineArg" in output
    assert "enable_log_requests" in output
    assert not list(stack.work_dir.rglob("triton.log"))


@pytest.mark.full
@pytest.mark.parametrize("cause", ["its own error", "SIGKILL"])
def test_engine_death_ends_requests_and_leaves_triton(cause: str, tmp_path: Path) -> None:
    stack = VLLMStack(tmp_path, VLLM_DOUBLE_DELAY="0.02")
    with stack.served():
        triton = pid_of(stack, "bin/tritonserver")
        host = pid_of(stack, ":VLLMHost")
        url = f"{stack.triton}/v2/models/vllm_model/generate_stream"
        values = {"text_input": "abc", "stream": True, "parameters": {"max_tokens": 4000}}
        with httpx.stream("POST", url, json=values, timeout=30) as response:
            chunks = response.iter_text()
            first = next(chunks)
            if cause == "SIGKILL":
                os.kill(host, signal.SIGKILL)
            else:
                stack.death.touch()
            text = first + "".join(chunks)
        assert "E2105 TritonUnavailable" in text
        stack.death.unlink(missing_ok=True)
        values = {"text_input": "abc", "parameters": {"max_tokens": 3}}
        wait_until(
            lambda: httpx.post(url.removesuffix("_stream"), json=values, timeout=30).is_success
        )
        assert pid_of(stack, ":VLLMHost") != host
        assert pid_of(stack, "bin/tritonserver") == triton
