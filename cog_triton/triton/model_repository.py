"""Model repository: ``triton_model_repo/`` rendered for one engine, through protobuf.

Argument names of the text models are those of TensorRT-LLM's templates and of the original
cog-triton. Each variable of those templates is applied, or refused with the reason.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import text_format

from cog_triton.engines import model_config_proto
from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry
from cog_triton.engines.base import COALESCE, REQUEST_DECODER, EngineFamily
from cog_triton.engines.generate_stream import ADAPTER_LOADER, STEP_MODEL
from cog_triton.engines.model_config_proto import TEMPLATE_DEFAULTS, model_config_pb2
from cog_triton.engines.tensor_contract import ALIASES, FINISH_REASON, LORA_NAME
from cog_triton.errors import InvalidPredictorConfig, nearest
from cog_triton.pictures.image_limits import ImageLimits
from cog_triton.removed import check_keys
from cog_triton.settings.environment_types import IMAGE_ENGINE_DIR
from cog_triton.system.paths import triton_model_repo
from cog_triton.text.stop_strings import WordLimits
from cog_triton.triton.serve_config import FAMILY_MODELS, MODELS, ServeConfig

_log = logging.getLogger(__name__)

ENGINE_MODEL = "tensorrt_llm"
_TOKENIZER_TYPES = ("auto", "llama", "t5")
# Parameters that only our own rendering sets.
_INTERNAL_PARAMETERS = frozenset(
    {"engine_input_names", "engine_streams", "max_input_len", "max_words", "max_word_length"}
    | {COALESCE, REQUEST_DECODER}
)
_NO_IMAGES = "images are not served here, text alone is"
_NO_DRAFT = (
    "no draft engine is served beside another: name a draft model in vLLM's speculative_config"
)

_BATCH = "triton_max_batch_size"
_TEXT = frozenset({_BATCH, "logits_datatype", "decoupled_mode"})
_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "preprocessing": frozenset(
        {_BATCH, "preprocessing_instance_count", "tokenizer_type", "engine_dir", "hf_model_path"}
        | {"max_queue_delay_microseconds", "max_queue_size", "multimodal_model_path"}
        | {"max_num_images"}
    ),
    "postprocessing": frozenset({_BATCH, "postprocessing_instance_count", "tokenizer_type"}),
    "ensemble": _TEXT,
    "tensorrt_llm_bls": _TEXT
    | {"bls_instance_count", "multimodal_encoders_name", "tensorrt_llm_draft_model_name"},
}
"""Arguments that are no parameters of a config."""


def _set(config: Any, name: str, value: Any) -> None:
    """Set one of `_ARGUMENTS`; raises ValueError with the rule that the value breaks."""
    match name:
        case "triton_max_batch_size":
            config.max_batch_size = _whole(value, 1)
        case "preprocessing_instance_count" | "bls_instance_count":
            config.instance_group[0].count = _whole(value, 1)
        case "postprocessing_instance_count":
            if _whole(value, 1) > 1:
                _log.warning(
                    "postprocessing.args.%s=%s: one instance is started: with more, Triton reorders"
                    " the text of a stream",
                    *(name, value),
                )
        case "max_queue_delay_microseconds":
            config.dynamic_batching.max_queue_delay_microseconds = _whole(value, 0)
        case "max_queue_size":
            config.dynamic_batching.default_queue_policy.max_queue_size = _whole(value, 0)
        case "tokenizer_type":  # tokenizer.json has it
            if value not in _TOKENIZER_TYPES:
                raise ValueError(f"must be {', '.join(_TOKENIZER_TYPES)}; better leave it out")
        case "engine_dir":
            served = config.parameters["tokenizer_dir"].string_value
            if not isinstance(value, str) or Path(value) != Path(served):
                raise ValueError(f"{_NO_IMAGES}, so nothing reads it")
        case "logits_datatype":
            kinds = {item.data_type for item in config.output if item.name == "context_logits"}
            must = model_config_pb2.DataType.Name(kinds.pop())
            if value != must:
                raise ValueError(f"must be {must}, as of tensorrt_llm")
        case "decoupled_mode":
            config.model_transaction_policy.decoupled = to_flag(config.name, value)
        case "tensorrt_llm_draft_model_name":
            raise ValueError(_NO_DRAFT)
        case _:
            raise ValueError(_NO_IMAGES)


def _whole(value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"must be a whole number, {least} or more")
    return value


def apply_arguments(config: Any, arguments: Mapping[str, Any], engine_dir: Path) -> None:
    """Set `arguments` on a text model's config; `engine_dir` is the engine that is served.

    Raises:
        InvalidPredictorConfig: names the argument, its value and the rule or the nearest name.
    """
    check_keys(arguments)
    own = _ARGUMENTS.get(config.name, frozenset())
    parameters = config.parameters.keys() - _INTERNAL_PARAMETERS
    for name, given in arguments.items():
        where, value = f"{config.name}.args.{name}={given!r}", given
        if name.endswith("_dir") and isinstance(given, str) and Path(given) == IMAGE_ENGINE_DIR:
            value = str(engine_dir)  # which the original's configs name so
        try:
            if name in own:
                _set(config, name, value)
            elif name not in parameters:
                known = sorted({*own, *parameters})
                hint = f"{nearest(name, known)}; known: {', '.join(known)}"
                raise ValueError(f"unknown argument{hint}")
            elif isinstance(value, str | int | float):
                config.parameters[name].string_value = str(value)
            else:
                raise ValueError("must be text, a number, true or false")
        except ValueError as error:
            raise InvalidPredictorConfig(f"{where}: {error}") from None


def to_flag(model: str, value: Any) -> bool:
    """Whether a model is to be decoupled; raises E1202."""
    if str(value).lower() not in ("true", "false"):
        raise InvalidPredictorConfig(
            f"{model}.args.decoupled_mode={value!r}: must be true or false"
        )
    return str(value).lower() == "true"


_MODEL_PY = '''"""Written by cog_triton when the model repository was rendered."""

from cog_triton.backend.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_STEP_TENSORS = """
input { name: "call" data_type: TYPE_UINT8 dims: [-1] }
output { name: "bytes" data_type: TYPE_UINT8 dims: [-1] }
model_transaction_policy { decoupled: true }
instance_group { count: 1 kind: KIND_CPU }
"""
_LOADER_TENSORS = """
input { name: "lora_name" data_type: TYPE_STRING dims: [1] }
output { name: "lora_task_id" data_type: TYPE_UINT64 dims: [1] }
instance_group { count: 1 kind: KIND_CPU }
"""


_COPIES = {"tensorrt_llm_bls": "ensemble"}
"""Models that are another one, without output_ids."""


def render_repository(
    family: EngineFamily,
    serve_config: ServeConfig,
    target: Path,
    word_limits: WordLimits | None = None,
    image_limits: ImageLimits | None = None,
) -> Path:
    """Write every model's ``config.pbtxt`` and ``1/`` under `target`; returns `target`.

    `word_limits` replace those of the text models' configs, `image_limits` are for models that take
    images. Raises E1202 naming an argument that its model does not have.
    """
    source = triton_model_repo()
    shutil.rmtree(target, ignore_errors=True)
    engine_config: Any = None
    others = [name for name in MODELS if name != ENGINE_MODEL]
    for model in FAMILY_MODELS:
        if model not in family.extra_models and serve_config.arguments_of(model):
            raise InvalidPredictorConfig(f"{model}.args: a {family.name} engine has no {model}")
    for model in (ENGINE_MODEL, *others, *family.extra_models):
        of = source / _COPIES.get(model, model)
        config = read_config(of / "config.pbtxt")
        config.name = model
        if model in _COPIES:
            outputs = [item for item in config.output if item.name != "output_ids"]
            config.ClearField("output")
            config.output.extend(outputs)
        version = target / model / "1"
        version.mkdir(parents=True)
        if model == ENGINE_MODEL:
            engine_config = config
            arguments = dict(serve_config.arguments_of(model))
            if family.backend == "python":
                _render_python_engine(config, arguments.pop("decoupled_mode", True))
                _write_private_model(target / STEP_MODEL, _STEP_TENSORS, "step_model")
            model_py = family.render(config, arguments)
            if family.registry is not None:
                _render_adapters(family.registry, config, target)
            if model_py is not None:
                (version / "model.py").write_text(model_py, "utf-8")
        elif model in family.extra_models:
            apply_arguments(config, serve_config.arguments_of(model), family.tokenizer_dir)
            family.render_extra_model(config)
            _set_image_limits(config, family, image_limits or ImageLimits())
        else:
            config.max_batch_size = engine_config.max_batch_size
            if not engine_config.model_transaction_policy.decoupled:
                config.ClearField("model_transaction_policy")
            if "tokenizer_dir" in config.parameters:
                config.parameters["tokenizer_dir"].string_value = str(family.tokenizer_dir)
            _set_limits(config, engine_config, family, word_limits)
            _set_abilities(config, engine_config)
            family.adapt_text_model(config)
            apply_arguments(config, serve_config.arguments_of(model), family.tokenizer_dir)
        code = of / "1" / "model.py"
        if code.is_file():
            shutil.copy(code, version)
        (target / model / "config.pbtxt").write_text(text_format.MessageToString(config), "utf-8")
    return target


def _render_adapters(registry: AdapterRegistry, config: Any, target: Path) -> None:
    if config.backend == "python":
        config.parameters[REGISTRY].string_value = str(registry.path)
        config.input.add(
            name=LORA_NAME, data_type=model_config_pb2.TYPE_STRING, dims=[1], optional=True
        )
        return
    own = {REGISTRY: str(registry.path)}
    _write_private_model(target / ADAPTER_LOADER, _LOADER_TENSORS, "adapter_loader", own)


def _write_private_model(
    folder: Path, tensors: str, module: str, parameters: Mapping[str, str] = MappingProxyType({})
) -> None:
    config = model_config_pb2.ModelConfig(name=folder.name, backend="python")
    text_format.Merge(tensors, config)
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_MODEL_PY.format(module=module), "utf-8")
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config), "utf-8")


def _render_python_engine(config: Any, decoupled_mode: Any) -> None:
    """Set what all engines of ours have: streams, a finish reason, and older names of inputs."""
    config.output.add(name=FINISH_REASON, data_type=model_config_pb2.TYPE_STRING, dims=[1])
    config.model_transaction_policy.decoupled = to_flag("tensorrt_llm", decoupled_mode)
    for tensor in tuple(config.input):
        for alias in (alias for alias, name in ALIASES.items() if name == tensor.name):
            config.input.add().CopyFrom(tensor)
            config.input[-1].name = alias


def _set_abilities(config: Any, engine_config: Any) -> None:
    """Tell a text model how the engine's model answers, and what makes its requests."""
    streams = str(engine_config.model_transaction_policy.decoupled).lower()
    abilities = {"engine_streams": streams}
    for name in (COALESCE, REQUEST_DECODER):
        if name in engine_config.parameters:
            abilities[name] = engine_config.parameters[name].string_value
    for name in abilities.keys() & config.parameters.keys():
        config.parameters[name].string_value = abilities[name]


def _set_limits(
    config: Any, engine_config: Any, family: EngineFamily, word_limits: WordLimits | None
) -> None:
    """Set the limits that a text model checks before it encodes."""
    if "max_input_len" not in config.parameters:
        return
    # With an encoder, the prompt is its input, whose length the engine alone knows.
    if not Path(engine_config.parameters["encoder_model_path"].string_value).is_absolute():
        limits = family.limits
        longest = min(limits.max_input_len, limits.max_seq_len - 1)
        config.parameters["max_input_len"].string_value = str(max(longest, 1))
    if word_limits is not None:
        config.parameters["max_words"].string_value = str(word_limits.count)
        config.parameters["max_word_length"].string_value = str(word_limits.length)


def _set_image_limits(config: Any, family: EngineFamily, limits: ImageLimits) -> None:
    if count := min(limits.count, family.abilities.images):
        config.parameters["max_images"].string_value = str(count)
        config.parameters["max_image_bytes"].string_value = str(limits.size)
        config.parameters["max_image_pixels"].string_value = str(limits.pixels)


def max_batch_size(repository: Path) -> int:
    """Maximum batch size of the engine's model in a rendered repository."""
    return int(read_config(repository / ENGINE_MODEL / "config.pbtxt").max_batch_size)


def read_config(path: Path) -> Any:
    """One ``config.pbtxt`` as tritonclient's ModelConfig; a template's with its defaults."""
    return model_config_proto.parse(path.read_text("utf-8"), TEMPLATE_DEFAULTS)
