"""Config of Triton's text models (preprocessing, postprocessing, ensemble, BLS) from arguments.

Argument names are those of TensorRT-LLM's templates and of the original cog-triton. Every variable
of those templates is either applied or rejected with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from cog_triton.environment_types import IMAGE_ENGINE_DIR
from cog_triton.errors import InvalidPredictorConfig, nearest

_log = logging.getLogger(__name__)

_INSTANCE_COUNTS: Mapping[str, str] = {
    "preprocessing": "preprocessing_instance_count",
    "postprocessing": "postprocessing_instance_count",
    "tensorrt_llm_bls": "bls_instance_count",
}
_TOKENIZER_TYPES = ("auto", "llama", "t5")
# Parameters that only our own rendering sets.
_INTERNAL_PARAMETERS = (
    "engine_input_names",
    "engine_streams",
    "engine_takes_bias",
    "max_input_len",
    "max_words",
    "max_word_length",
    "reports_finish_reason",
)
_NO_IMAGES = "images are not served here, text alone is"
_UNSUPPORTED: Mapping[str, Mapping[str, str]] = {
    "preprocessing": {
        "multimodal_model_path": _NO_IMAGES,
        "max_num_images": _NO_IMAGES,
        "hf_model_path": _NO_IMAGES,
    },
    "tensorrt_llm_bls": {
        "multimodal_encoders_name": _NO_IMAGES,
        "tensorrt_llm_draft_model_name": "no draft engine is served beside another: name a draft"
        " model in vLLM's speculative_config",
    },
}


def apply_arguments(config: Any, arguments: Mapping[str, Any], engine_dir: Path) -> None:
    """Set `arguments` on a text model's config; `engine_dir` is the engine that is served.

    Raises:
        InvalidPredictorConfig: names the argument, its value and the rule or the nearest name.
    """
    for name, value in arguments.items():
        where = f"{config.name}.args.{name}={value!r}"
        reason = _UNSUPPORTED.get(config.name, {}).get(name)
        if reason is not None:
            raise InvalidPredictorConfig(f"{where}: {reason}")
        setter = _setters(config).get(name)
        if setter is None:
            known = sorted(_setters(config))
            raise InvalidPredictorConfig(
                f"{where}: unknown argument{nearest(name, known)}; known: {', '.join(known)}"
            )
        try:
            setter(
                config,
                name,
                _resolve_engine_dir(value, engine_dir) if name.endswith("_dir") else value,
            )
        except ValueError as error:
            raise InvalidPredictorConfig(f"{where}: {error}") from None


Setter = Callable[[Any, str, Any], None]


def _setters(config: Any) -> dict[str, Setter]:
    found: dict[str, Setter] = {
        name: _set_parameter for name in config.parameters if name not in _INTERNAL_PARAMETERS
    }
    found["triton_max_batch_size"] = _set_batch_size
    if config.name in _INSTANCE_COUNTS:
        found[_INSTANCE_COUNTS[config.name]] = _set_instances
    if config.name in ("preprocessing", "postprocessing"):
        found["tokenizer_type"] = _check_tokenizer_type
    if config.name == "preprocessing":
        found |= {
            "engine_dir": _check_engine_dir,
            "max_queue_delay_microseconds": _set_queue_delay,
            "max_queue_size": _set_queue_size,
        }
    if config.name in ("ensemble", "tensorrt_llm_bls"):
        found["logits_datatype"] = _check_logits
        found["decoupled_mode"] = _set_decoupled
    return found


def _resolve_engine_dir(value: Any, engine_dir: Path) -> Any:
    """Replace the image's engine directory, which the original's configs name, by the real one."""
    return str(engine_dir) if isinstance(value, str) and Path(value) == IMAGE_ENGINE_DIR else value


def _set_parameter(config: Any, name: str, value: Any) -> None:
    if not isinstance(value, str | int | float):
        raise ValueError("must be text, a number, true or false")
    config.parameters[name].string_value = str(value)


def _set_batch_size(config: Any, name: str, value: Any) -> None:
    config.max_batch_size = _integer(value, 1)


def _set_instances(config: Any, name: str, value: Any) -> None:
    count = _integer(value, 1)
    if config.name == "postprocessing" and count > 1:
        count = 1
        _log.warning(
            "postprocessing.args.%s=%s: one instance is started: with more, Triton reorders the"
            " text of a stream",
            name,
            value,
        )
    config.instance_group[0].count = count


def _set_queue_delay(config: Any, name: str, value: Any) -> None:
    config.dynamic_batching.max_queue_delay_microseconds = _integer(value, 0)


def _set_queue_size(config: Any, name: str, value: Any) -> None:
    config.dynamic_batching.default_queue_policy.max_queue_size = _integer(value, 0)


def _check_tokenizer_type(config: Any, name: str, value: Any) -> None:
    """Check and ignore: tokenizer.json has the type, and TensorRT-LLM dropped the argument."""
    if value not in _TOKENIZER_TYPES:
        raise ValueError(f"must be {', '.join(_TOKENIZER_TYPES)}; better leave it out")


def _check_engine_dir(config: Any, name: str, value: Any) -> None:
    served = config.parameters["tokenizer_dir"].string_value
    if not isinstance(value, str) or Path(value) != Path(served):
        raise ValueError(_NO_IMAGES + ", so nothing reads it")


def _check_logits(config: Any, name: str, value: Any) -> None:
    (kind,) = {item.data_type for item in config.output if item.name == "context_logits"}
    if value != model_config_pb2.DataType.Name(kind):
        raise ValueError(f"must be {model_config_pb2.DataType.Name(kind)}, as of tensorrt_llm")


def _set_decoupled(config: Any, name: str, value: Any) -> None:
    config.model_transaction_policy.decoupled = to_flag(config.name, value)


def to_flag(model: str, value: Any) -> bool:
    """Whether a model is to be decoupled; raises E1202."""
    if str(value).lower() not in ("true", "false"):
        raise InvalidPredictorConfig(
            f"{model}.args.decoupled_mode={value!r}: must be true or false"
        )
    return str(value).lower() == "true"


def _integer(value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"must be a whole number, {least} or more")
    return value
