"""Settings of ``tensorrt_llm.args``: the variables of NVIDIA's template of that Triton model.

The template comes with TensorRT-LLM, and has the inputs, outputs and settings of its release. Where
the image lacks it, ours takes its place, which has those of 1.2. Values are passed on: the backend
judges them, but for those that `setting_rules` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cog_triton.engines import model_config_proto
from cog_triton.engines.tensor_contract import ALIASES
from cog_triton.engines.tensorrt_llm.engine_directory import Engine
from cog_triton.errors import InvalidPredictorConfig, nearest
from cog_triton.removed import check_keys
from cog_triton.system.paths import triton_model_repo

NVIDIAS_TEMPLATE = Path("/app/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt")
"""In NVIDIA's container of Triton and TensorRT-LLM."""
_DATA_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
_RENAMED_IN = (0, 20)


def template_path() -> Path:
    """The template in use: NVIDIA's, else ours."""
    ours = triton_model_repo() / "tensorrt_llm" / "config.pbtxt"
    return NVIDIAS_TEMPLATE if NVIDIAS_TEMPLATE.is_file() else ours


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a serve config that have a value.

    Raises E1005 for a name that was removed, E1202 for those that the template lacks, with the
    nearest that it has.
    """
    found = {name: value for name, value in arguments.items() if value not in (None, "")}
    check_keys(found)
    known = sorted(model_config_proto.variables(template_path().read_text("utf-8")))
    unknown = [
        f"tensorrt_llm.args.{name}={value!r}: unknown setting of a TensorRT-LLM engine"
        + nearest(name, known)
        for name, value in found.items()
        if name not in known
    ]
    if unknown:
        raise InvalidPredictorConfig("; ".join(unknown))
    return found


def notation(name: str, value: Any) -> str:
    """A value as the backend reads it: lists with commas, groups and trees as NVIDIA has them."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, list | tuple):
        return str(value)
    if not all(isinstance(item, list | tuple) for item in value):
        return ",".join(map(str, value))
    if name.endswith("_choices"):
        return ", ".join("{" + ", ".join(map(str, path)) + "}" for path in value)
    return ";".join(",".join(map(str, group)) for group in value)


def defaults(engine: Engine) -> dict[str, str]:
    """The settings that depend on what an engine was built with; the backend has all others."""
    model, limits = engine.config.pretrained_config, engine.config.build_config
    found = {
        **model_config_proto.TEMPLATE_DEFAULTS,
        "triton_max_batch_size": str(limits.max_batch_size),
        "batching_strategy": "inflight_fused_batching",
        "logits_datatype": _DATA_TYPES.get(model.logits_dtype, "TYPE_FP32"),
        "prompt_embedding_table_data_type": _DATA_TYPES.get(model.dtype, "TYPE_FP16"),
    }
    if not engine.paged_context:
        found["enable_kv_cache_reuse"] = "false"
    if engine.decoding_mode is not None:
        found["decoding_mode"] = engine.decoding_mode
    return found


def fill(values: Mapping[str, Any], engine: Engine) -> Any:
    """The template with `values`, which `defaults` are among, as tritonclient's ModelConfig.

    Raises E1202 for a value that does not fit where the template has its name.
    """
    path = template_path()
    filled = {name: notation(name, value) for name, value in values.items()}
    filled["engine_dir"] = str(engine.directory)
    if (info := values.get("xgrammar_tokenizer_info_path")) is not None:
        filled["xgrammar_tokenizer_info_path"] = str(engine.directory / info)
    text = path.read_text("utf-8")
    try:
        config = model_config_proto.parse(text, filled)
    except model_config_proto.ParseError as error:
        line = text.splitlines()[(error.GetLine() or 1) - 1].strip()
        shown = " ".join(
            f"tensorrt_llm.args.{name}={values.get(name)!r}:"
            for name in model_config_proto.variables(line)
        )
        raise InvalidPredictorConfig(f"{shown} not for {line!r} of {path}: {error}") from error
    if path != NVIDIAS_TEMPLATE and engine.release < _RENAMED_IN:
        older = {name: alias for alias, name in ALIASES.items()}
        for tensor in config.input:
            tensor.name = older.get(tensor.name, tensor.name)
    # Each group of GPUs is an instance of its own.
    config.instance_group[0].count = len(filled.get("gpu_device_ids", "").split(";"))
    return config
