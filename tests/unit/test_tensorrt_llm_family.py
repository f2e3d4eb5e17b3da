"""TensorRT-LLM family: engines are detected, read, and served with their release's contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_engines
import tensorrt_llm_engines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorrt_llm_engines import END, OLD_TEMPLATE, V0_9, V1, parameters, render
from test_tensor_contract import REQUESTS

from cog_triton import errors
from cog_triton.backend.text_inputs import ENGINE_NAMES
from cog_triton.engines import tensor_contract
from cog_triton.engines.registry import open_engine
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.tensorrt_llm import model_settings
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.errors import EngineCorrupt, EngineIncompatible, InvalidArgument
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton import model_repository
from cog_triton.triton.model_repository import read_config
from cog_triton.triton.serve_config import load_serve_config

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
RELEASES = ["0.9.0", "1.2.1"]
PLAIN = EngineRequest(
    input_ids=[5, 6], sampling=SamplingParams(max_tokens=3, min_tokens=2, top_k=5, seed=7)
)


@contextmanager
def of_release(path: Path, version: str) -> Iterator[TensorRTLLMFamily]:
    """A family in a container that has NVIDIA's template of this version."""
    old = version.startswith("0.9")
    with pytest.MonkeyPatch.context() as patch:
        if old:
            patch.setattr(model_settings, "NVIDIAS_TEMPLATE", OLD_TEMPLATE)
        yield tensorrt_llm_engines.family(path, V0_9 if old else V1)


def test_a_manifest_alone_identifies_the_family(tmp_path: Path) -> None:
    path = tensorrt_llm_engines.make(tmp_path / "engine")
    (path / "rank0.engine").unlink()
    assert not TensorRTLLMFamily.matches(path)
    sample_engines.with_manifest(path)
    assert TensorRTLLMFamily.matches(path)
    with pytest.raises(EngineCorrupt, match=r"rank0\.engine is missing"):
        open_engine(path)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [([0, 2], r"rank1\.engine is missing: .* 2 ranks"), ([0, 1, 2], r"3 rank\*\.engine")],
)
def test_missing_or_extra_ranks_are_refused(ranks: list[int], said: str, tmp_path: Path) -> None:
    mapping = {"world_size": 2, "tp_size": 2}
    path = tensorrt_llm_engines.make(tmp_path / "engine", pretrained_config__mapping=mapping)
    for rank in range(3):
        (path / f"rank{rank}.engine").unlink(missing_ok=True)
    for rank in ranks:
        (path / f"rank{rank}.engine").touch()
    with pytest.raises(EngineCorrupt, match=said):
        TensorRTLLMFamily.open(path)


@pytest.mark.parametrize(
    ("config", "changes", "chunked", "length"),
    [
        # TrtGptModel: max_seq_len - 1, or what fits into one step, or as built.
        (V1, {}, True, 8191),
        (V1, {}, False, 8191),
        (V1, {"build_config__max_num_tokens": 2048}, False, 2048),
        (V1, {"build_config__max_num_tokens": 2048}, True, 8191),
        (V1, {"build_config__plugin_config__context_fmha": False}, False, 4096),
        (V1, {"build_config__plugin_config__remove_input_padding": False}, False, 4096),
        (V0_9, {}, False, 1024),
    ],
)
def test_max_input_len_depends_on_release_and_build_options(
    config: dict[str, Any], changes: dict[str, Any], chunked: bool, length: int, tmp_path: Path
) -> None:
    opened = tensorrt_llm_engines.family(tmp_path / "engine", config, **changes)
    arguments = {"enable_chunked_context": True} if chunked else {}
    render(opened, tmp_path / "repo", {"tensorrt_llm": arguments})
    assert opened.limits.max_input_len == length
    assert opened.limits.max_batch_size == 64
    assert opened.limits.max_seq_len == (1536 if config is V0_9 else 8192)


@pytest.mark.parametrize(
    ("generation", "eos", "ends", "pad"),
    [
        (None, "<|im_end|>", (END,), END),
        ({"eos_token_id": [0, END], "pad_token_id": 9}, "<|im_end|>", (END, 0), 9),
        ({"eos_token_id": 0}, None, (0,), 0),
        ({}, None, (), None),
    ],
)
def test_end_ids_come_from_tokenizer_and_generation_config(
    generation: Any, eos: str | None, ends: tuple[int, ...], pad: int | None, tmp_path: Path
) -> None:
    path = tensorrt_llm_engines.make(tmp_path / "engine")
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    (path / "generation_config.json").unlink()
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    opened = TensorRTLLMFamily.open(path)
    assert opened.engine.end_ids == ends
    assert opened.limits.end_id == next(iter(ends), None)
    assert opened.limits.pad_id == pad


@pytest.mark.parametrize("version", RELEASES)
def test_every_release_gets_a_consistent_repository(version: str, tmp_path: Path) -> None:
    with of_release(tmp_path / "engine", version) as opened:
        configs = render(opened, tmp_path / "repo")
    engine = configs["tensorrt_llm"]
    inputs = {tensor.name: tensor for tensor in engine.input}
    outputs = {tensor.name: tensor for tensor in engine.output}
    old = version == "0.9.0"
    assert {"min_length", "random_seed"} <= inputs.keys() if old else "seed" in inputs
    assert not inputs.keys() & ({"min_tokens", "seed"} if old else {"min_length", "random_seed"})
    bls = configs["tensorrt_llm_bls"]
    fed, sent = ({tensor.name for tensor in side} for side in (bls.input, bls.output))
    own = {"text_output", "batch_index", "sequence_index"}
    assert sent - own <= outputs.keys()
    assert own <= sent
    assert {tensor.name for tensor in configs["ensemble"].input} == fed
    assert {tensor.name for tensor in configs["ensemble"].output} == sent | {"output_ids"}
    assert (
        parameters(configs["ensemble"])["engine_input_names"]
        == (parameters(bls)["engine_input_names"])
    )
    names = dict(
        pair.split(":") for pair in parameters(bls)["engine_input_names"].split(",") if pair
    )
    for name in fed & ENGINE_NAMES.keys():
        assert names.get(ENGINE_NAMES[name], ENGINE_NAMES[name]) in inputs
    for model in ("preprocessing", "ensemble", "tensorrt_llm_bls"):
        assert parameters(configs[model])["end_id"] == str(END)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=REQUESTS, version=st.sampled_from(RELEASES))
def test_a_request_is_encoded_in_inputs_of_its_release_or_refused(
    request: EngineRequest, version: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    opened, inputs = _opened(tmp_path_factory, version)
    try:
        values = opened.encode_request(request)
    except InvalidArgument as error:
        refused = error.detail.partition("=")[0]
        values = {}
    if not values:
        assert refused not in inputs
        return
    assert values.keys() <= inputs.keys()
    required = {name for name, tensor in inputs.items() if not tensor.optional}
    assert required <= values.keys() | {"input_ids"}
    sampling = request.sampling
    assert values["request_output_len"] == sampling.max_tokens
    new = "min_tokens" in inputs
    assert values["min_tokens" if new else "min_length"] == sampling.min_tokens
    assert values["seed" if new else "random_seed"] == sampling.seed
    words = values.get("stop_words_list", [])
    assert tensor_contract.unflatten_words(np.array(words).reshape(2, -1)) == (
        *request.stop_words,
        *(((0,),) if request.end_id == END else ()),
    )


_OPENED: dict[str, Any] = {}


def _opened(paths: pytest.TempPathFactory, version: str) -> Any:
    if version not in _OPENED:
        path = paths.mktemp("engine")
        with of_release(path / "engine", version) as opened:
            model = render(opened, path / "repo")["tensorrt_llm"]
        _OPENED[version] = opened, {tensor.name: tensor for tensor in model.input}
    return _OPENED[version]


def test_a_logit_bias_is_sent_as_embedding_bias(tmp_path: Path) -> None:
    unknown = tensorrt_llm_engines.family(tmp_path / "unknown")
    assert "logit_bias" not in unknown.abilities.sampling
    size = 50
    opened = tensorrt_llm_engines.family(tmp_path / "engine", pretrained_config__vocab_size=size)
    assert "logit_bias" in opened.abilities.sampling
    sampling = SamplingParams(max_tokens=3, logit_bias={2: -1.5, size - 1: 100.0})
    sent = opened.encode_request(replace(PLAIN, sampling=sampling))["embedding_bias"]
    assert (len(sent), sent[2], sent[-1]) == (size, -1.5, 100.0)
    assert sum(map(bool, sent)) == 2
    sampling = SamplingParams(max_tokens=3, logit_bias={size: 1.0})
    with pytest.raises(errors.InvalidArgument, match=f"logit_bias: {size}: must be less than"):
        opened.encode_request(replace(PLAIN, sampling=sampling))
    assert "embedding_bias" not in opened.encode_request(PLAIN)


def test_further_end_ids_are_sent_as_stop_words(tmp_path: Path) -> None:
    opened = tensorrt_llm_engines.family(tmp_path / "engine")
    given = replace(PLAIN, end_id=opened.limits.end_id, stop_words=((8, 9),))
    assert opened.encode_request(given)["stop_words_list"] == [8, 9, 0, 2, 3, -1]
    for end in (-1, 77, None):
        assert "stop_words_list" not in opened.encode_request(replace(PLAIN, end_id=end))


CHECK = "[TensorRT-LLM][ERROR] Assertion failed: "
SAID: list[tuple[str, type[errors.CogTritonError], str]] = [
    (
        "Prompt length (9000) exceeds maximum input length (8191). Set log level to info and check"
        " TRTGptModel logs for how maximum input length is set (/llmRequest.h:520)",
        errors.PromptTooLong,
        "Prompt length (9000) exceeds maximum input length (8191)",
    ),
    (
        "Encoder length (3) exceeds maximum encoder input length (2).",
        errors.PromptTooLong,
        "encoder input length (2)",
    ),
    (CHECK + "!mInputTokenIds.empty() (/requestImpl.h:383)", errors.PromptRequired, "input_ids"),
    (CHECK + "mMaxNewTokens > 0 (/requestImpl.h)", InvalidArgument, "request_output_len: must be"),
    (
        "Maximum queue size of 256 has been reached, please try again later",
        errors.Overloaded,
        "256 requests are waiting",
    ),
    ("Exceeds maximum queue size", errors.Overloaded, "max_queue_size"),
    ("Cache is full. There are no done tasks to evict", errors.Overloaded, "LoRA"),
    (
        CHECK + "temperature.value() >= 0.f (/samplingConfig.cpp:309)",
        InvalidArgument,
        "temperature: must be >= 0.",
    ),
    (CHECK + "topP.value() <= 1.f (/x)", InvalidArgument, "runtime_top_p: must be <= 1."),
    (CHECK + "repetitionpenalty.value() > 0.f (/x)", InvalidArgument, "repetition_penalty: must"),
    (CHECK + "beamWidth > 0 && beamWidth <= x (/x)", InvalidArgument, "beam_width: must"),
    (
        "LoRA task 10 not found in cache. Please send LoRA weights with request",
        InvalidArgument,
        "lora_task_id=10: not loaded",
    ),
    (
        "Encountered an error when fetching new request: " + CHECK + "Request is specified with"
        " GuidedDecodingParams, but GuidedDecoder is not setup. Please provide",
        InvalidArgument,
        "without guided_decoding_backend",
    ),
    ("Guided decoding does not support with beam search.", InvalidArgument, "beam_width"),
    (
        "Trying to stop a request but request ID is not provided",
        InvalidArgument,
        "stop=True",
    ),
    (
        "Encountered an error in forwardAsync function: [TensorRT-LLM][ERROR] CUDA runtime error in"
        " cudaMemcpyAsync: an illegal memory access was encountered",
        errors.TritonUnavailable,
        "CUDA runtime error",
    ),
    ("Server is stopping, scheduler for model has stopped accepting new inference requests",
     errors.TritonUnavailable, "stopping"),
    ("something else", errors.TritonUnknownError, "something else"),
    ("in ensemble 'ensemble', E1001 PromptRequired: text_input", errors.PromptRequired, "text_"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "detail"), SAID)
def test_backend_messages_get_error_codes(
    text: str, kind: type[errors.CogTritonError], detail: str, tmp_path: Path
) -> None:
    found = tensorrt_llm_engines.family(tmp_path / "engine").classify_error(text)
    assert type(found) is kind
    assert detail in found.detail


START = [
    (
        "[TensorRT-LLM][ERROR] IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The"
        " engine plan file is generated on an incompatible device, expecting compute 9.0 got"
        " compute 8.6, please rebuild.)",
        "built for compute capability 8.6, this GPU has 9.0",
    ),
    (
        "[TensorRT-LLM][ERROR] 6: The engine plan file is not compatible with this version of"
        " TensorRT, expecting library version 10.14.1.48 got 10.11.0.33, please rebuild.",
        "built by TensorRT 10.11.0.33, here is 10.14.1.48",
    ),
    (
        "The engine plan file is not compatible with this version of TensorRT, expecting library"
        " version 10.4.0.26 got ..",
        "TensorRT",
    ),
    (
        "Serialization assertion stdVersionRead == serializationVersion failed.Version tag does not"
        " match. Note: Current Version: 239, Serialized Engine Version: 237",
        "another TensorRT (serialization version 237, here 239)",
    ),
    ("Assertion failed: tensor parallelism mismatch", "tensor parallelism"),
    (
        "[TensorRT-LLM][ERROR] Assertion failed: With communicationMode kLEADER, MPI worldSize is"
        " expected to be equal to tp*pp*cp when participantIds are not specified",
        "a process for each rank",
    ),
]


@pytest.mark.parametrize(("line", "said"), START)
def test_start_failures_in_tritons_log_get_error_codes(
    line: str, said: str, tmp_path: Path
) -> None:
    opened = tensorrt_llm_engines.family(tmp_path / "engine")
    found = opened.classify_start_failure(
        f"I0101 loading\n{line}\nerror: creating server: Internal\n"
    )
    assert isinstance(found, EngineIncompatible)
    assert said in found.detail
    assert opened.classify_start_failure("E0101 something else") is None


@pytest.mark.parametrize("version", RELEASES)
def test_a_model_that_is_not_decoupled_is_asked_for_whole_answers(
    version: str, tmp_path: Path
) -> None:
    with of_release(tmp_path / "engine", version) as opened:
        assert opened.encode_request(PLAIN)["streaming"] is True
        serve_config = load_serve_config(CONFIGS / "whole-answers.yaml")
        model_repository.render_repository(opened, serve_config, tmp_path / "repo")
    values = opened.encode_request(PLAIN)
    assert values["streaming"] is False
    assert ("exclude_input_in_output" in values) is (version == "1.2.1")
    for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        config = read_config(tmp_path / "repo" / model / "config.pbtxt")
        assert not config.model_transaction_policy.decoupled
