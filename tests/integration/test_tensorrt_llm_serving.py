"""TensorRT-LLM engines on the real Triton, as far as one goes without a GPU.

The compiled backend is the one thing that is missing: in its place a Python model takes the
rendered inputs, says which it got, and answers with the prompt's tokens.
"""

import dataclasses
import json
import queue
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient
from generated_text import Texts
from google.protobuf import text_format
from layers import full
from local_parent import linked
from loop_thread import PORTAL, call
from lora_adapters import adapter
from stack import Stack, wait_until

from cog_triton.artifact.lora_adapter import read_adapter
from cog_triton.engines.adapter_registry import AdapterRegistry, RegisteredAdapter
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import StepItem
from cog_triton.engines.tensorrt_llm import model_settings
from cog_triton.engines.tensorrt_llm.adapter_tensors import to_tensors
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.errors import EngineIncompatible, InvalidArgument, PromptTooLong
from cog_triton.serving.generate import TextGenerator
from cog_triton.settings import Settings, load_settings
from cog_triton.system.ports import free_ports
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton import launch, model_repository
from cog_triton.triton.request_streams import RequestStreams
from cog_triton.triton.serve_config import load_serve_config
from cog_triton.triton.server import TritonClient, TritonServer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import tensorrt_llm_engines

pytestmark = pytest.mark.integration

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
BACKEND = Path(__file__).parents[1] / "tensorrt_llm_tree" / "backend" / "model.py"


class Served:
    """A Triton with a rendered repository, and what its engine model was sent."""

    def __init__(
        self, settings: Settings, server: TritonServer, family: TensorRTLLMFamily, seen: Path
    ) -> None:
        self.url = settings.triton_url
        self.family = family
        self.client = TritonClient(settings)
        self.transport = RequestStreams(
            lambda: server.grpc_target,
            20,
            family.classify_error,
            family.encode_request,
            server.engine_inputs(),
        )
        self.generator = TextGenerator(
            settings,
            family.limits,
            EngineTokenizer.load(family.directory),
            self.transport,
            family.classify_error,
        )
        self._seen = seen
        self._server = server

    @property
    def grpc(self) -> str:
        return self._server.grpc_target

    def last(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._seen.read_text().splitlines()[-1])
        return found

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._seen.read_text().splitlines()]

    def texts(self, model: str, **values: Any) -> list[str]:
        body = {"text_input": "the quick fox", "max_tokens": 4, **values}
        with httpx.stream(
            "POST", f"{self.url}/v2/models/{model}/generate_stream", json=body, timeout=240
        ) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line]
        assert all("text_output" in event for event in events), events
        return [event["text_output"] for event in events]

    def grpc_stream(self, **inputs: npt.NDArray[Any]) -> list[dict[str, Any]]:
        """The responses of tensorrt_llm_bls, as tensors by name."""
        types = {np.float16: "FP16", np.int32: "INT32", np.uint64: "UINT64", np.bool_: "BOOL"}
        tensors = []
        for name, value in inputs.items():
            kind = types.get(value.dtype.type, "BYTES")
            tensors.append(grpcclient.InferInput(name, value.shape, kind))
            tensors[-1].set_data_from_numpy(value)
        answers: queue.Queue[Any] = queue.Queue()
        found = []
        with grpcclient.InferenceServerClient(self.grpc) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer("tensorrt_llm_bls", tensors, enable_empty_final_response=True)
            while True:
                result, error = answers.get(timeout=60)
                assert error is None, error
                head = result.get_response()
                found.append({out.name: result.as_numpy(out.name) for out in head.outputs})
                if head.parameters["triton_final_response"].bool_param:
                    return found


@contextmanager
def served(
    directory: Path,
    config: dict[str, Any],
    serve: str,
    *options: str,
    registry: AdapterRegistry | None = None,
) -> Iterator[Served]:
    """`options` are added to tritonserver's."""
    target, seen = directory / "repo", directory / "seen"
    with pytest.MonkeyPatch.context() as patch:
        if config is tensorrt_llm_engines.V0_9:
            old = tensorrt_llm_engines.OLD_TEMPLATE
            patch.setattr(model_settings, "NVIDIAS_TEMPLATE", old)
        family = tensorrt_llm_engines.family(directory / "engine", config)
        family.registry = registry
        model_repository.render_repository(family, load_serve_config(CONFIGS / serve), target)
    path = target / "tensorrt_llm" / "config.pbtxt"
    engine = model_repository.read_config(path)
    engine.backend = "python"
    engine.parameters["seen"].string_value = str(seen)
    path.write_text(text_format.MessageToString(engine), "utf-8")
    shutil.copy(BACKEND, target / "tensorrt_llm" / "1" / "model.py")
    http, metrics = free_ports(2)
    settings = load_settings(
        triton_http_port=http,
        triton_metrics_port=metrics,
        cog_triton_keys=Path("/"),  # no relay, which would need a port
    )

    async def start() -> None:
        async def probe() -> None:
            await running.transport.open({})
            await running.generator.probe()

        async with aclosing(running.client):
            await server.start(running.client.is_ready, probe)

    launched = launch.launch_command

    def with_options(*args: Any) -> launch.LaunchCommand:
        command = launched(*args)
        return dataclasses.replace(command, argv=[*command.argv, *options])

    with (
        pytest.MonkeyPatch.context() as patch,
        PORTAL.wrap_async_context_manager(linked(directory)) as parent,
    ):
        patch.setattr(launch, "launch_command", with_options)
        server = TritonServer(settings, target, parent)
        running = Served(settings, server, family, seen)
        try:
            call(start)
            yield running
        finally:
            call(running.transport.disconnect)


def generated(triton: Served, ids: list[int], adapter: str | None = None, **sampling: float) -> str:
    """The whole text that follows `ids`."""
    asked = EngineRequest(
        input_ids=ids,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        adapter=adapter,
    )
    generator = triton.generator
    return "".join(Texts(generator, generator.plan(asked)))


@pytest.fixture(scope="module", params=[full("0.9"), "1.2"])
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
    old = triton.family.engine.release < (0, 20)
    # The config of the original has the BLS model repeat the text so far.
    accumulated = old and model == "tensorrt_llm_bls"
    assert (said[-1] if accumulated else "".join(said)) == "the quick fox"
    seen = triton.last()
    assert seen["min_length" if old else "min_tokens"] == [2]
    assert seen["random_seed" if old else "seed"] == [7]
    assert seen["end_id"] == [tensorrt_llm_engines.END]
    assert seen["request_output_len"] == [4]
    fox = EngineTokenizer.load(triton.family.directory).encode("fox", add_special_tokens=False)
    ends = [len(fox), *[-1] * (len(fox) - 1)]
    assert seen["bad_words_list"] == [*fox, *ends]
    assert seen["shapes"]["bad_words_list"] == [1, 2, len(fox)]


def test_bls_passes_numbers_and_text_on_exactly(triton: Served) -> None:
    values = {"temperature": 0.1, "top_p": 1.1754943e-38, "repetition_penalty": 3.4028235e38}
    said = triton.texts("tensorrt_llm_bls", stream=True, seed=2**64 - 1, bad_words=["a b", "c"])
    assert said
    triton.texts("tensorrt_llm_bls", stream=True, seed=2**64 - 1, top_k=-(2**31), **values)
    seen = triton.last()
    old = triton.family.engine.release < (0, 20)
    assert seen["random_seed" if old else "seed"] == [2**64 - 1]
    assert seen["runtime_top_k"] == [-(2**31)]
    for name, theirs in (("temperature",) * 2, ("top_p", "runtime_top_p")):
        assert np.float32(seen[theirs][0]) == np.float32(values[name])
    assert seen["repetition_penalty"] == [float(np.float32(3.4028235e38))]
    assert seen["streaming"] == [True]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_bls_passes_numbers_that_are_not_finite_on(value: str, triton: Served) -> None:
    body = f'{{"text_input": "a", "max_tokens": 1, "temperature": {value}}}'
    url = f"{triton.url}/v2/models/tensorrt_llm_bls/generate"
    assert httpx.post(url, content=body, timeout=20).status_code == 200
    assert str(triton.last()["temperature"][0]) == str(float(value))


def test_bls_outputs_have_the_shapes_of_the_engines(triton: Served) -> None:
    text = np.array([[b"the quick"]], dtype=object)
    responses = triton.grpc_stream(
        text_input=text,
        max_tokens=np.array([[4]], dtype=np.int32),
        stream=np.array([[True]]),
        return_log_probs=np.array([[True]]),
    )
    found = [each["output_log_probs"] for each in responses if "output_log_probs" in each]
    assert {each.dtype for each in found} == {np.dtype(np.float32)}
    assert {each.shape[:2] for each in found} == {(1, 1)}
    values = np.concatenate(found, axis=-1).ravel()
    assert values[:2].tolist() == np.array([-0.1, -np.inf], dtype=np.float32).tolist()


def test_bls_passes_tensors_on_that_json_does_not_carry(triton: Served) -> None:
    inputs = {
        "text_input": np.array([[b"the quick"]], dtype=object),
        "max_tokens": np.array([[4]], dtype=np.int32),
        "lora_task_id": np.array([[2**63 + 1]], dtype=np.uint64),
        "lora_weights": np.arange(6, dtype=np.float16).reshape(1, 2, 3) / 3,
        "lora_config": np.arange(6, dtype=np.int32).reshape(1, 2, 3),
        "return_context_logits": np.array([[True]]),
    }
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(triton.grpc_stream, **inputs) for _ in range(32)]
        for answer in answers:
            (response, *_) = answer.result(60)
            assert response["text_output"].ravel().tolist() == [b"the quickthe quick"]
            assert response["context_logits"].tolist() == [[[0, 1, 2], [3, 4, 5]]]
    seen = triton.last()
    assert seen["lora_weights"] == inputs["lora_weights"].ravel().tolist()
    assert seen["shapes"]["lora_weights"] == [1, 2, 3]
    assert seen["shapes"]["lora_config"] == [1, 2, 3]
    assert seen["lora_task_id"] == [2**63 + 1]


@pytest.mark.full
def test_adapters_are_loaded_within_triton_and_then_named_by_their_task(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "registry.json")
    sql = adapter(tmp_path / "sql", 4, modules=["self_attn.q_proj", "mlp.up_proj"], layers=2)
    odd = adapter(tmp_path / "odd", modules=["mlp.odd_proj"])
    registry.write(
        [
            RegisteredAdapter("sql", 1, sql, 4, "sql"),
            RegisteredAdapter("odd", 2, odd, 4, "odd"),
        ]
    )
    config = "tensorrt-llm.yaml"
    with served(tmp_path, tensorrt_llm_engines.V1, config, registry=registry) as triton:

        def say(name: str, count: int = 3) -> str:
            return generated(triton, ids, adapter=name, max_tokens=count)

        ids = EngineTokenizer.load(triton.family.directory).encode("the quick fox")
        assert {say("sql") for _ in range(3)} == {"the quick fox"}
        assert say("sql", 17) == "the quick fox"
        assert say("sql") == "the quick fox", "it was evicted, and is loaded again"
        with pytest.raises(EngineIncompatible, match="odd_proj: TensorRT-LLM adapts"):
            say("odd")
        with pytest.raises(InvalidArgument, match="no such adapter; did you mean 'sql'"):
            say("sqll")
        requests = triton.all()
    loads = [seen for seen in requests if "lora_weights" in seen]
    assert [seen["shapes"]["lora_weights"] for seen in loads] == [[1, 4, 128], [1, 4, 128]]
    assert loads[0]["lora_task_id"] == [(1 << 32) + 1]
    for name, expected in to_tensors(read_adapter(sql)).items():
        assert np.array_equal(np.array(loads[0][name], expected.dtype), expected.ravel())
    named = [seen for seen in requests if "lora_task_id" in seen and "lora_weights" not in seen]
    assert len(named) == 5 + 2 + 1, "two were sent twice; an adapter that is none was sent once"


@pytest.mark.full
def test_bls_requests_wait_in_no_http_thread(tmp_path: Path) -> None:
    """Each holds a connection and makes another; the engine answers when it has all 64."""
    config = tensorrt_llm_engines.V1
    with (
        served(tmp_path, config, "tensorrt-llm.yaml", "--http-thread-count=1") as triton,
        ThreadPoolExecutor(64) as pool,
    ):
        answers = [
            pool.submit(triton.texts, "tensorrt_llm_bls", max_tokens=64, stream=True)
            for _ in range(64)
        ]
        assert {"".join(answer.result(240)) for answer in answers} == {"the quick fox"}


@pytest.mark.full
@pytest.mark.parametrize(
    "config", [tensorrt_llm_engines.V0_9, tensorrt_llm_engines.V1], ids=["0.9", "1.2"]
)
def test_a_model_that_answers_whole_serves_text_and_predictions(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with served(tmp_path, config, "whole-answers.yaml") as triton:
        for model in ("ensemble", "tensorrt_llm_bls"):
            tensor = grpcclient.InferInput("text_input", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[b"the quick"]], dtype=object))
            size = grpcclient.InferInput("max_tokens", [1, 1], "INT32")
            size.set_data_from_numpy(np.array([[4]], dtype=np.int32))
            with grpcclient.InferenceServerClient(triton.grpc) as client:
                found = client.infer(model, [tensor, size]).as_numpy("text_output")
            assert found.tolist() == [b"the quickthe quick"]
        ids = EngineTokenizer.load(triton.family.directory).encode("the quick fox")
        assert generated(triton, ids, max_tokens=9, temperature=0) == "the quick fox"
        assert triton.last()["streaming"] == [False]
        assert_stops(triton)
        with pytest.raises(PromptTooLong, match=r"Prompt length \(900\) exceeds"):
            generated(triton, [1, 2], max_tokens=13)


def assert_stops(triton: Served) -> None:
    """Requests pass by one that the engine holds, and that one is stopped once it is cancelled."""
    items: queue.Queue[StepItem] = queue.Queue()
    request = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=64))
    held = call(triton.transport.submit, request, {}, items.put)
    wait_until(lambda: triton.last()["request_output_len"] == [64])
    ids = EngineTokenizer.load(triton.family.directory).encode("the quick fox")
    assert generated(triton, ids, max_tokens=9) == "the quick fox"
    call(held.cancel)
    wait_until(lambda: triton.last().get("stop") == [True])
    assert generated(triton, ids, max_tokens=9) == "the quick fox"
    assert items.empty()


def test_what_is_cancelled_is_stopped(triton: Served) -> None:
    assert_stops(triton)


def test_predictions_use_the_contract_of_the_engines_release(triton: Served) -> None:
    ids = EngineTokenizer.load(triton.family.directory).encode("the quick fox")
    text = generated(triton, ids, max_tokens=9, min_tokens=1, temperature=0, seed=3)
    assert text == "the quick fox"
    seen = triton.last()
    old = triton.family.engine.release < (0, 20)
    assert seen["random_seed" if old else "seed"] == [3]
    assert seen["runtime_top_k"] == [1]
    assert seen["stop_words_list"] == [0, 1]  # the second end id, as a stop word


def test_backend_errors_have_codes_in_bls_and_in_predictions(triton: Served) -> None:
    body = {"text_input": "the quick fox", "max_tokens": 13}
    url = f"{triton.url}/v2/models/tensorrt_llm_bls/generate"
    said = httpx.post(url, json=body, timeout=60).json()["error"]
    assert "E1002 PromptTooLong: Prompt length (900) exceeds maximum input length (512)" in said
    with pytest.raises(PromptTooLong, match=r"Prompt length \(900\) exceeds"):
        generated(triton, [1, 2], max_tokens=13)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_inputs_newer_than_the_engine_are_refused(triton: Served, model: str) -> None:
    if triton.family.engine.release >= (0, 19):
        triton.texts(model, stream=True, guided_decoding_guide_type="json")
        assert triton.last()["guided_decoding_guide_type"]
        return
    body = {"text_input": "a", "max_tokens": 1, "guided_decoding_guide_type": "json"}
    response = httpx.post(f"{triton.url}/v2/models/{model}/generate", json=body, timeout=60)
    assert response.status_code == 400
    assert "guided_decoding_guide_type" in response.json()["error"]


@pytest.mark.parametrize("skip", [False, full(True)])
def test_an_unsuitable_machine_is_refused_before_triton_starts(skip: bool, tmp_path: Path) -> None:
    engine = tensorrt_llm_engines.make(tmp_path / "engine")
    environment = {"COG_TRITON_SKIP_PREFLIGHT": "true"} if skip else {}
    stack = Stack(tmp_path / "work", str(engine), **environment)
    stack.start()
    code, output = stack.finish()
    assert code == 1
    assert "has no tensorrtllm backend, it has python: use a runner image" in output
    if skip:
        assert "COG_TRITON_SKIP_PREFLIGHT is set, so this is served" in output
        assert "E2106" in output
    else:
        assert "E1305" in output
        assert "there is no GPU here" in output
        assert not list(tmp_path.rglob("triton.log"))
