"""Triton config rendering: from settings to config.pbtxt, for the engine's release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cog_triton.engines.model_config_proto import model_config_pb2
from cog_triton.engines.tensorrt_llm.backend_settings import Parameters, notation
from cog_triton.engines.tensorrt_llm.engine_directory import Engine
from cog_triton.engines.tensorrt_llm.releases import ReleaseContract
from cog_triton.engines.tensorrt_llm.setting_rules import DATA_TYPES

_KEYS = {
    "batching_strategy": "gpt_model_type",
    "engine_dir": "gpt_model_path",
    "encoder_engine_dir": "encoder_model_path",
}
# Settings that are fields of config.pbtxt, not parameters.
_FIELDS = frozenset(
    {
        "triton_backend",
        "triton_max_batch_size",
        "decoupled_mode",
        "max_queue_delay_microseconds",
        "max_queue_size",
        "logits_datatype",
        "prompt_embedding_table_data_type",
        "encoder_input_features_data_type",
    }
)
# The backend reads these three without a default: they must be there, even if empty.
_GUIDED = ("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path")
_LOGITS = ("context_logits", "generation_logits", "draft_logits")


def resolve_defaults(parameters: Parameters, engine: Engine) -> Parameters:
    """Fill in the settings that default to what the engine was built with."""
    model, contract = engine.config.pretrained_config, engine.contract
    mode = engine.decoding_mode
    derived: dict[str, Any] = {
        "triton_max_batch_size": engine.config.build_config.max_batch_size,
        "enable_kv_cache_reuse": contract.reuses_kv_cache and engine.paged_context,
        "decoding_mode": mode if mode and contract.has_decoding_mode(mode) else None,
        "logits_datatype": DATA_TYPES.get(model.logits_dtype, "TYPE_FP32"),
        "prompt_embedding_table_data_type": DATA_TYPES.get(model.dtype, "TYPE_FP16"),
    }
    values = dict(parameters)
    values |= {name: value for name, value in derived.items() if values[name] is None}
    return Parameters.model_construct(_fields_set=parameters.model_fields_set, **values)


def render_engine_config(config: Any, parameters: Parameters, engine: Engine) -> None:
    """Fill `config`, the defaults of ``tensorrt_llm``, for an engine, from resolved settings."""
    config.backend = parameters.triton_backend
    config.max_batch_size = parameters.triton_max_batch_size
    config.model_transaction_policy.decoupled = parameters.decoupled_mode
    batching = config.dynamic_batching
    batching.preferred_batch_size[:] = [parameters.triton_max_batch_size]
    batching.max_queue_delay_microseconds = parameters.max_queue_delay_microseconds
    batching.default_queue_policy.max_queue_size = parameters.max_queue_size
    config.instance_group[0].count = len(parameters.gpu_device_ids or (0,))
    _render_tensors(config, parameters, engine.contract)
    config.parameters.clear()
    for key, value in _parameters(parameters, engine).items():
        config.parameters[key].string_value = value


def _parameters(parameters: Parameters, engine: Engine) -> dict[str, str]:
    contract = engine.contract
    values = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}
    if contract.reads_guided_decoding:
        values |= dict.fromkeys(_GUIDED, "")
    settings = dict(parameters) | {"engine_dir": engine.directory}
    if parameters.xgrammar_tokenizer_info_path is not None:
        settings["xgrammar_tokenizer_info_path"] = (
            engine.directory / parameters.xgrammar_tokenizer_info_path
        )
    for name, value in settings.items():
        if value is not None and name not in _FIELDS and contract.release >= Parameters.since(name):
            values[_KEYS.get(name, name)] = notation(name, value)
    return values


def _render_tensors(config: Any, parameters: Parameters, contract: ReleaseContract) -> None:
    _keep_tensors(config.input, contract.has_input)
    _keep_tensors(config.output, contract.has_output)
    types: dict[str, Any] = dict.fromkeys(_LOGITS, parameters.logits_datatype)
    types["prompt_embedding_table"] = parameters.prompt_embedding_table_data_type
    types["encoder_input_features"] = parameters.encoder_input_features_data_type
    for tensor in (*config.input, *config.output):
        if tensor.name in types:
            tensor.data_type = model_config_pb2.DataType.Value(types[tensor.name])
    for tensor in config.input:
        if contract.scalars_have_a_dimension and tensor.name in (
            "request_output_len",
            "streaming",
            "stop",
        ):
            tensor.ClearField("reshape")
        if tensor.name == "input_ids" and contract.release < (0, 15):
            tensor.optional = False
        tensor.name = contract.renamed.get(tensor.name, tensor.name)


def _keep_tensors(tensors: Any, wanted: Any) -> None:
    """Delete from a repeated field the tensors whose names are not `wanted`."""
    for place in reversed(range(len(tensors))):
        if not wanted(tensors[place].name):
            del tensors[place]


def adapt_text_config(config: Any, parameters: Parameters, engine: Engine) -> None:
    """Adapt a text model's config, by its name, to the inputs and outputs of ``tensorrt_llm``."""
    if config.name in ("ensemble", "tensorrt_llm_bls"):
        _keep_tensors(config.input, lambda name: _is_accepted(name, engine.contract))
        _keep_tensors(
            config.output, lambda name: name in _INDICES or engine.contract.has_output(name)
        )
        renamed = engine.contract.renamed
        config.parameters["engine_input_names"].string_value = ",".join(
            f"{name}:{theirs}" for name, theirs in renamed.items()
        )
    for tensor in config.output:
        if tensor.name in _LOGITS:
            tensor.data_type = model_config_pb2.DataType.Value(parameters.logits_datatype)
    for key, token in (("end_id", next(iter(engine.end_ids), None)), ("pad_id", engine.pad_id)):
        if key in config.parameters and token is not None:
            config.parameters[key].string_value = str(token)


# Outputs that the text models make themselves, for engines of all releases.
_INDICES = ("batch_index", "sequence_index")
# Inputs of the text models by the input of tensorrt_llm that they become.
_ENGINE_INPUTS: Mapping[str, str] = {"decoder_text_input": "decoder_input_ids"}


def _is_accepted(name: str, contract: ReleaseContract) -> bool:
    return contract.has_input(_ENGINE_INPUTS.get(name, name))
