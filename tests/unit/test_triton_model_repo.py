"""Model repository: consistency of the config.pbtxt files, and the text models' helpers."""

from typing import Any

import numpy as np
import pytest

from cog_triton.backend import text_inputs
from cog_triton.backend.answers import TextResponses
from cog_triton.engines import tensor_contract
from cog_triton.system.paths import triton_model_repo
from cog_triton.triton.model_repository import read_config

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble")
REPOSITORY = triton_model_repo()
CONFIGS: dict[str, Any] = {
    model: read_config(REPOSITORY / model / "config.pbtxt") for model in MODELS
}


def shape(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_type, tuple(tensor.dims)


def inputs(model: str) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in CONFIGS[model].input}


def outputs(model: str) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in CONFIGS[model].output}


@pytest.mark.parametrize("model", MODELS)
def test_each_models_defaults_are_complete(model):
    config = CONFIGS[model]
    assert config.name == model
    assert config.max_batch_size == 64
    assert len(inputs(model)) == len(config.input)
    assert len(outputs(model)) == len(config.output)
    assert (REPOSITORY / model / "1").is_dir()
    assert (REPOSITORY / model / "1" / "model.py").is_file() == (config.backend == "python")


def test_postprocessing_has_one_instance():
    (group,) = CONFIGS["postprocessing"].instance_group
    assert group.count == 1


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_models_that_stream_are_decoupled(model):
    assert CONFIGS[model].model_transaction_policy.decoupled


def test_engine_model_has_every_input_of_the_contract():
    known = inputs("tensorrt_llm")
    rendered = {tensor_contract.LORA_NAME}  # for engines that have adapters by name
    contract = tensor_contract.SUPPORTED_INPUTS | tensor_contract._NEUTRAL.keys()
    assert known.keys() >= contract - rendered
    required = {name for name, tensor in known.items() if not tensor.optional}
    assert required == {"input_lengths", "request_output_len"}


def test_engine_inputs_are_scalars_ragged_or_positions():
    for name, tensor in inputs("tensorrt_llm").items():
        scalar = tensor.HasField("reshape")
        assert not (scalar and tensor.allow_ragged_batch), name
        if scalar:
            assert (list(tensor.dims), list(tensor.reshape.shape)) == ([1], [])
        elif not tensor.allow_ragged_batch:
            assert name in ("mrope_rotary_cos_sin", "mrope_position_deltas")


def test_text_models_and_text_inputs_have_the_same_names():
    assert sorted(text_inputs.KNOWN_INPUTS) == sorted(inputs("ensemble"))
    for name, theirs in text_inputs.ENGINE_NAMES.items():
        ours, engines = inputs("ensemble")[name], inputs("tensorrt_llm")[theirs]
        assert (ours.data_type, len(ours.dims)) == (engines.data_type, len(engines.dims))


def run(reply: TextResponses, chunks: list[list[int]]) -> list[dict[str, Any]]:
    """The responses to chunks of ids, whose log probs are the ids negated."""
    sent = []
    for chunk in chunks:
        log_probs = -np.array([[chunk]], dtype=np.float32)
        sent.append(reply.feed(chunk, {"output_log_probs": log_probs}))
        if reply.finished:
            break
    sent.append(reply.finish())
    return [response for response in sent if response]


def texts(responses: list[dict[str, Any]]) -> list[str]:
    return [response["text_output"].item().decode() for response in responses]
