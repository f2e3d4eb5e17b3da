"""TensorRT-LLM engines on the real Triton, as far as one goes without a GPU.

The compiled backend is the one thing that is missing: in its place a Python model takes the
rendered inputs, says which it got, and answers with the prompt's tokens.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import text_format
from stack import Stack

from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.errors import PromptTooLong
from cog_triton.serving.generate import TextGenerator
from cog_triton.settings import Settings, load_settings
from cog_triton.system.ports import free_ports
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton import model_repository
from cog_triton.triton.client import TritonClient
from cog_triton.triton.serve_config import load_serve_config
from cog_triton.triton.server import TritonServer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import tensorrt_llm_engines

pytestmark = pytest.mark.integration

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
STAND_IN = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.path = json.loads(args["model_config"])["parameters"]["seen"]["string_value"]

    def execute(self, requests):
        for request in requests:
            seen = {t.name(): t.as_numpy().ravel().tolist() for t in request.inputs()}
            seen = {name: value for name, value in seen.items() if value}
            with open(self.path, "a") as file:
                file.write(json.dumps(seen, default=str) + "\\n")
            sender = request.get_response_sender()
            if seen["request_output_len"] == [13]:
                text = "[ERROR] Prompt length (900) exceeds maximum input length (512)"
                sender.send(
                    pb_utils.InferenceResponse(error=pb_utils.TritonError(text)),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )
                continue
            for token in seen["input_ids"]:
                ids = np.array([[[token]]], dtype=np.int32)
                length = np.array([[1]], dtype=np.int32)
                sender.send(pb_utils.InferenceResponse(output_tensors=[
                    pb_utils.Tensor("output_ids", ids), pb_utils.Tensor("sequence_length", length),
                ]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


class Served:
    """A Triton with a rendered repository, and what its engine model was sent."""

    def __init__(self, settings: Settings, family: TensorRTLLMFamily, seen: Path) -> None:
        self.url = settings.triton_url
        self.family = family
        self.client = TritonClient(self.url, 20, family.classify_error)
        self.generator = TextGenerator(
            settings,
            family.limits,
            EngineTokenizer.load(family.directory),
            self.client,
            encode_request=family.encode_request,
        )
        self._seen = seen

    def last(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._seen.read_text().splitlines()[-1])
        return found

    def texts(self, model: str, **values: Any) -> list[str]:
        body = {"text_input": "the quick fox", "max_tokens": 4, **values}
        with httpx.stream(
            "POST", f"{self.url}/v2/models/{model}/generate_stream", json=body, timeout=20
        ) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line]
        assert all("text_output" in event for event in events), events
        return [event["text_output"] for event in events]


@contextmanager
def served(directory: Path, config: dict[str, Any], serve: str) -> Iterator[Served]:
    family = tensorrt_llm_engines.family(directory / "engine", config)
    target, seen = directory / "repo", directory / "seen"
    model_repository.render_repository(family, load_serve_config(CONFIGS / serve), target)
    path = target / "tensorrt_llm" / "config.pbtxt"
    engine = model_repository.read_config(path)
    engine.backend = "python"
    engine.parameters["seen"].string_value = str(seen)
    path.write_text(text_format.MessageToString(engine), "utf-8")
    (target / "tensorrt_llm" / "1" / "model.py").write_text(STAND_IN)
    http, grpc, metrics = free_ports(3)
    settings = load_settings(
        triton_http_port=http, triton_grpc_port=grpc, triton_metrics_port=metrics
    )
    server = TritonServer(settings, target, directory)
    running = Served(settings, family, seen)

    async def start() -> None:
        async def probe() -> None:
            await asyncio.to_thread(running.generator.probe)

        async with running.client:
            await server.start(running.client.is_ready, probe)

    try:
        asyncio.run(start())
        yield running
    finally:
        server.kill()


@pytest.fixture(scope="module", params=["0.9", "1.2"])
def triton(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    old = request.param == "0.9"
    directory = tmp_path_factory.mktemp("triton")
    config = tensorrt_llm_engines.V0_9 if old else tensorrt_llm_engines.V1
    serve_config = "tensorrt-llm-0.9.yaml" if old else "tensorrt-llm.yaml"
    with served(directory, config, serve_config) as running:
        yield running


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_models_use_the_contract_of_the_engines_release(triton: Served, model: str) -> None:
    said = triton.texts(
        model, stream=True, min_tokens=2, seed=7, bad_words=["fox"], stop_words=["dog"]
    )
    old = triton.family.engine.contract.release < (0, 20)
    # The config of the original has the BLS model repeat the text so far.
    accumulated = old and model == "tensorrt_llm_bls"
    assert (said[-1] if accumulated else "".join(said)) == "the quick fox"
    seen = triton.last()
    assert seen["min_length" if old else "min_tokens"] == [2]
    assert seen["random_seed" if old else "seed"] == [7]
    assert seen["end_id"] == [tensorrt_llm_engines.END]
    assert seen["request_output_len"] == [4]
    ids, ends = seen["bad_words_list"][: len(seen["bad_words_list"]) // 2], seen["bad_words_list"]
    assert ends[len(ids)] == len(ids)


def test_predictions_use_the_contract_of_the_engines_release(triton: Served) -> None:
    generator = triton.generator
    ids = EngineTokenizer.load(triton.family.directory).encode("the quick fox")
    sampling = SamplingParams(max_tokens=9, min_tokens=1, temperature=0, seed=3)
    text = "".join(generator.stream(generator.plan(ids, sampling)))
    assert text == "the quick fox"
    seen = triton.last()
    old = triton.family.engine.contract.release < (0, 20)
    assert seen["random_seed" if old else "seed"] == [3]
    assert seen["runtime_top_k"] == [1]
    assert seen["stop_words_list"] == [0, 1]  # the second end id, as a stop word


def test_backend_errors_have_codes_in_bls_and_in_predictions(triton: Served) -> None:
    body = {"text_input": "the quick fox", "max_tokens": 13}
    url = f"{triton.url}/v2/models/tensorrt_llm_bls/generate"
    said = httpx.post(url, json=body, timeout=20).json()["error"]
    assert "E1002 PromptTooLong: Prompt length (900) exceeds maximum input length (512)" in said
    plan = triton.generator.plan([1, 2], SamplingParams(max_tokens=13))
    with pytest.raises(PromptTooLong, match=r"Prompt length \(900\) exceeds"):
        list(triton.generator.stream(plan))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_inputs_newer_than_the_engine_are_refused(triton: Served, model: str) -> None:
    if triton.family.engine.contract.release >= (0, 19):
        triton.texts(model, stream=True, guided_decoding_guide_type="json")
        assert triton.last()["guided_decoding_guide_type"]
        return
    body = {"text_input": "a", "max_tokens": 1, "guided_decoding_guide_type": "json"}
    response = httpx.post(f"{triton.url}/v2/models/{model}/generate", json=body, timeout=20)
    assert response.status_code == 400
    assert "guided_decoding_guide_type" in response.json()["error"]


@pytest.mark.parametrize("skip", [False, True])
def test_an_unsuitable_machine_is_refused_before_triton_starts(skip: bool, tmp_path: Path) -> None:
    engine = tensorrt_llm_engines.make(tmp_path / "engine")
    environment = {"COG_TRITON_SKIP_PREFLIGHT": "true"} if skip else {}
    stack = Stack(tmp_path / "work", str(engine), **environment)
    stack.start()
    code, output = stack.finish(seconds=60)
    assert code == 1
    assert "has no tensorrtllm backend, it has python: use a runner image" in output
    if skip:
        assert "COG_TRITON_SKIP_PREFLIGHT is set, so this is served" in output
        assert "E2106" in output
    else:
        assert "E1305" in output
        assert "there is no GPU here" in output
        assert not list(tmp_path.rglob("triton.log"))
