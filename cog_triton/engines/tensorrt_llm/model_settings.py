"""Settings of ``tensorrt_llm.args``: the variables of NVIDIA's template of that Triton model.

The template comes with TensorRT-LLM, and has the inputs, outputs and settings of its release. Where
the image lacks it, ours takes its place, which has those of 1.2. Values are passed on, and the
backend judges them, but for ten mistakes that cost GPU hours: it finds these after it has loaded
the engine, or answers with other behaviour than was requested.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cog_triton.engines import model_config_proto
from cog_triton.engines.tensor_contract import ALIASES
from cog_triton.engines.tensorrt_llm.engine_directory import SPECULATIVE, Engine
from cog_triton.errors import InvalidPredictorConfig, nearest
from cog_triton.removed import check_keys
from cog_triton.settings.environment_types import IMAGE_ENGINE_DIR
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


def check(values: Mapping[str, Any], engine: Engine, own: Collection[str] = ()) -> None:
    """Raise E1202 naming every setting that breaks a rule, with its value and the rule.

    `own` are names of those that the engine carries itself.
    """
    broken = [
        f"tensorrt_llm.args.{name}={values[name]!r}: {rule}"
        + ("; it is one that the engine carries, and a serve config overrides" * (name in own))
        for name, rule in problems(values, engine)
    ]
    if broken:
        raise InvalidPredictorConfig("; ".join(broken))


def problems(values: Mapping[str, Any], engine: Engine) -> Iterator[tuple[str, str]]:
    """Every setting that breaks a rule: its name and the rule, see `check`."""
    settings = {name: notation(name, value) for name, value in values.items()}
    for name, value in settings.items():
        if rule := _broken(name, value, settings, engine):
            yield name, rule


def _broken(name: str, value: str, settings: Mapping[str, str], engine: Engine) -> str:
    build = engine.config.build_config
    match name:
        case "triton_max_batch_size" | "max_beam_width":
            limit = build.max_beam_width or 1 if name == "max_beam_width" else build.max_batch_size
            if not (value.isdecimal() and 1 <= int(value) <= limit):
                own = name.removeprefix("triton_")
                return f"must be a whole number, and not be above the engine's {own}, {limit}"
        case "enable_chunked_context" | "enable_kv_cache_reuse":
            if value.lower() not in ("true", "false"):
                return "must be true or false"
            if value.lower() == "true" and not engine.paged_context:
                return (
                    "needs an engine built with a paged KV cache and use_paged_context_fmha; this"
                    f" one has paged KV cache {build.paged_kv_cache} and use_paged_context_fmha"
                    f" {bool(build.plugin_config.use_paged_context_fmha)}"
                )
        case "kv_cache_free_gpu_mem_fraction":
            try:
                fits = 0 < float(value) < 1
            except ValueError:
                fits = False
            return "" if fits else "must be a number greater than 0 and less than 1"
        case "engine_dir":
            served = engine.directory.resolve()
            if Path(value) != IMAGE_ENGINE_DIR and Path(value).resolve() != served:
                return f"{served} is served: say which by ENGINE_DIR or COG_WEIGHTS"
        case "num_nodes":
            if not (value.isdecimal() and int(value)) or engine.ranks % int(value):
                return f"the engine has {engine.ranks} ranks, which must be equally many on each"
        case "gpu_device_ids":
            nodes = settings.get("num_nodes", "1")
            count = engine.ranks // max(int(nodes), 1) if nodes.isdecimal() else engine.ranks
            for group in value.split(";"):
                ids = [number.strip() for number in group.split(",")]
                if len(ids) != count or len({*ids}) != count or not all(map(str.isdecimal, ids)):
                    return f"must be {count} different ids, of 0 or more, for each instance"
        case "decoding_mode":
            own = engine.decoding_mode or "none of the speculative ones"
            if value != own and (engine.decoding_mode or value in SPECULATIVE.values()):
                return f"the engine was built for {own} (speculative_decoding_mode)"
        case "logits_datatype":
            if value != (expected := defaults(engine)["logits_datatype"]):
                kind = engine.config.pretrained_config.logits_dtype
                return f"must be {expected}: the engine's is {kind}"
    return ""
