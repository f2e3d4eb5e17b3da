"""Settings of ``tensorrt_llm.args``: the variables of TensorRT-LLM 1.2's template, typed.

Meanings and defaults follow the backend's code (triton_backend/inflight_batcher_llm/src/
model_instance_state.cc) and its docs/model_config.md. None leaves a setting to the backend, or to
the engine where the table says so. Values are read from YAML, or from text as in the original's
templates; their notation in config.pbtxt is that of the backend's GetParameter (model_state.cc).
What a setting requires of others, or of the engine, is in
`cog_triton.engines.tensorrt_llm.setting_rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cog_triton.engines.tensorrt_llm.releases import Release
from cog_triton.errors import InvalidPredictorConfig, nearest
from cog_triton.removed import check_keys

_LISTS = re.compile(r"\s*\{[^{}]*\}(\s*,\s*\{[^{}]*\})*\s*")


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("must be true or false")


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    raise ValueError("must be a whole number")


def _number(value: Any) -> float:
    if not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            pass
        else:
            if math.isfinite(number):
                return number
    raise ValueError("must be a number")


def _text(value: Any) -> str:
    if not isinstance(value, str) or "${" in value:
        unfilled = isinstance(value, str)
        raise ValueError("is a template that was not filled in" if unfilled else "must be text")
    return value


def _path(value: Any) -> Path:
    return Path(_text(value))


def _wholes(value: Any) -> tuple[int, ...]:
    """4096, "4096,1024" or [4096, 1024]."""
    items = value.split(",") if isinstance(value, str) else value
    items = items if isinstance(items, list | tuple) else [items]
    try:
        return tuple(_whole(item.strip() if isinstance(item, str) else item) for item in items)
    except ValueError:
        raise ValueError("must be whole numbers with commas between") from None


def _groups(value: Any) -> tuple[tuple[int, ...], ...]:
    """ "0,1;2,3", [0, 1] or [[0, 1], [2, 3]]; a group for each instance of the model."""
    if isinstance(value, list) and all(isinstance(item, list) for item in value):
        groups = value
    else:
        groups = value.split(";") if isinstance(value, str) else [value]
    try:
        return tuple(_wholes(group) for group in groups)
    except ValueError:
        raise ValueError(
            "must be whole numbers, `,` between those of an instance and `;` between instances"
        ) from None


def _tree(value: Any) -> tuple[tuple[int, ...], ...]:
    """ "{0, 0}, {0, 1}" or [[0, 0], [0, 1]]."""
    if isinstance(value, str) and _LISTS.fullmatch(value):
        value = [item.split(",") for item in re.findall(r"\{([^{}]*)\}", value)]
    try:
        if isinstance(value, list) and value:
            return tuple(_wholes(list(map(_stripped, path))) for path in value)
    except (TypeError, ValueError):
        pass
    raise ValueError('must be paths of a tree as "{0}, {0, 0}, {0, 1}"')


def _stripped(item: Any) -> Any:
    return item.strip() if isinstance(item, str) else item


Flag = Annotated[bool, BeforeValidator(_flag)]
Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, BeforeValidator(_text)]
PathText = Annotated[Path, BeforeValidator(_path)]
Wholes = Annotated[tuple[int, ...], BeforeValidator(_wholes)]
Groups = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_groups)]
Tree = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_tree)]


def notation(name: str, value: Any) -> str:
    """A value in the notation of config.pbtxt."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, tuple):
        return str(value)
    if all(isinstance(item, int) for item in value):
        return ",".join(map(str, value))
    if name.endswith("_choices"):
        return ", ".join("{" + ", ".join(map(str, item)) + "}" for item in value)
    return ";".join(",".join(map(str, item)) for item in value)


DataType = Literal["TYPE_FP32", "TYPE_FP16", "TYPE_BF16"]
DecodingMode = Literal[
    "top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"
]
_INT32 = 2**31 - 1


def _setting(
    meaning: str, default: Any = None, *, unset: str = "", since: str = "0.9", **limits: Any
) -> Any:
    """`unset` says what None comes to; `since` is the first release whose backend reads it."""
    return Field(
        default,
        description=meaning,
        json_schema_extra={"unset": unset or "the backend's own", "since": since},
        **limits,
    )


class Parameters(BaseModel):
    """Settings of the Triton model ``tensorrt_llm``; unset ones are None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Batching.
    triton_backend: Literal["tensorrtllm"] = _setting("Triton backend", "tensorrtllm")
    triton_max_batch_size: Whole | None = _setting(
        "prompts in one Triton request at most", unset="the engine's max_batch_size", ge=1
    )
    decoupled_mode: Flag = _setting("responses as tokens come; needed to stream", True)
    batching_strategy: Literal["inflight_fused_batching", "inflight_batching", "V1", "v1"] = (
        _setting("how requests are batched", "inflight_fused_batching")
    )
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = _setting(
        "never pause a request once begun, or pack as many as fit", "guaranteed_no_evict"
    )
    max_queue_delay_microseconds: Whole = _setting(
        "µs that Triton waits for requests to batch", 0, ge=0
    )
    max_queue_size: Whole = _setting(
        "requests that may wait, further ones get E2107; 0 is no limit", 0, ge=0, le=_INT32
    )
    enable_chunked_context: Flag = _setting("prefill long prompts in pieces", False)
    max_beam_width: Whole = _setting("beams of a request at most", 1, ge=1, le=1024)

    # The engine.
    engine_dir: PathText | None = _setting("engine directory", unset="the one that is served")
    encoder_engine_dir: PathText | None = _setting(
        "encoder's engine directory, of encoder-decoder models", unset="none", since="0.11"
    )
    gpu_device_ids: Groups | None = _setting(
        "GPUs of a model instance, `,` between; `;` between instances", unset="all visible"
    )
    num_nodes: Whole = _setting("machines that the ranks are on", 1, since="0.19", ge=1)
    gpu_weights_percent: Number | None = _setting(
        "fraction of the weights kept on the GPU", unset="1", since="0.10", ge=0, le=1
    )

    # KV cache.
    enable_kv_cache_reuse: Flag | None = _setting(
        "keep keys and values for prompts with the same beginning",
        unset="since 0.19 whether the engine can, before that false",
    )
    kv_cache_free_gpu_mem_fraction: Number = _setting(
        "fraction of the GPU memory left after loading that the cache takes", 0.9, gt=0, lt=1
    )
    max_tokens_in_paged_kv_cache: Whole | None = _setting(
        "tokens that the cache holds at most", unset="no limit", ge=1, le=_INT32
    )
    kv_cache_host_memory_bytes: Whole | None = _setting(
        "bytes of host memory for cache blocks pushed off the GPU", unset="0", since="0.10", ge=0
    )
    kv_cache_onboard_blocks: Flag | None = _setting(
        "bring blocks back to the GPU before use", unset="true", since="0.10"
    )
    cross_kv_cache_fraction: Number | None = _setting(
        "fraction of the cache for cross attention, of encoder-decoder models",
        unset="none",
        since="0.14",
        gt=0,
        lt=1,
    )
    max_attention_window_size: Wholes | None = _setting(
        "tokens attended to, one number or one for each layer, `,` between",
        unset="the engine's max_seq_len",
    )
    sink_token_length: Whole | None = _setting(
        "first tokens that never leave the attention window", unset="0", since="0.10", ge=0
    )

    # How tokens are chosen.
    decoding_mode: DecodingMode | None = _setting(
        "how tokens are chosen", unset="the engine's, else top_k_top_p, with beams beam_search"
    )
    medusa_choices: Tree | None = _setting('tree as "{0}, {0, 0}"', unset="mc_sim_7b_63")
    eagle_choices: Tree | None = _setting(
        'tree as "{0}, {0, 0}"', unset="mc_sim_7b_63", since="0.16"
    )
    lookahead_window_size: Whole | None = _setting(
        "window of lookahead decoding, tokens", unset="none", since="0.19", ge=1
    )
    lookahead_ngram_size: Whole | None = _setting(
        "n-gram of lookahead decoding, tokens", unset="none", since="0.19", ge=1
    )
    lookahead_verification_set_size: Whole | None = _setting(
        "n-grams verified in one step", unset="none", since="0.19", ge=1
    )
    guided_decoding_backend: Literal["xgrammar"] | None = _setting(
        "what keeps output to a JSON schema, regex or grammar", unset="off", since="0.19"
    )
    xgrammar_tokenizer_info_path: PathText | None = _setting(
        "JSON with encoded_vocab, tokenizer_str, stop_token_ids; relative to the engine",
        unset="none",
        since="0.19",
    )
    tokenizer_dir: Text | None = _setting(
        "not read by the C++ backend: refused", unset="none", since="0.19"
    )

    # LoRA.
    lora_cache_optimal_adapter_size: Whole | None = _setting(
        "rank of an adapter that fills one cache page", unset="8", ge=1
    )
    lora_cache_max_adapter_size: Whole | None = _setting(
        "rank of the largest adapter", unset="64", ge=1
    )
    lora_cache_gpu_memory_fraction: Number | None = _setting(
        "fraction of the GPU memory left for adapters", unset="0.05", gt=0, lt=1
    )
    lora_cache_host_memory_bytes: Whole | None = _setting(
        "bytes of host memory for adapters", unset="1 GB", ge=1
    )
    lora_prefetch_dir: PathText | None = _setting(
        "directory of adapters to load at start", unset="none", since="0.19"
    )

    # Kernels.
    enable_trt_overlap: Flag | None = _setting(
        "overlap two micro-batches; without effect in most releases", unset="false"
    )
    multi_block_mode: Flag | None = _setting(
        "split long sequences over multiprocessors", unset="true", since="0.12"
    )
    enable_context_fmha_fp32_acc: Flag | None = _setting(
        "add up in FP32 in prefill attention", unset="false", since="0.12"
    )
    cuda_graph_mode: Flag | None = _setting("use CUDA graphs", unset="false", since="0.15")
    cuda_graph_cache_size: Whole | None = _setting(
        "CUDA graphs kept", unset="0", since="0.15", ge=0
    )

    # Requests, responses, statistics.
    exclude_input_in_output: Flag = _setting(
        "leave the prompt out of whole responses; streams never have it", False
    )
    normalize_log_probs: Flag = _setting("normalize log probabilities", True)
    cancellation_check_period_ms: Whole = _setting(
        "ms between looks for clients that have gone", 100, since="0.10", ge=1
    )
    stats_check_period_ms: Whole = _setting("ms between statistics", 100, since="0.10", ge=1)
    recv_poll_period_ms: Whole | None = _setting(
        "ms between looks for work of ranks; 0 spins", unset="0", since="0.13", ge=0
    )
    iter_stats_max_iterations: Whole | None = _setting(
        "iterations whose statistics are kept", since="0.10", ge=0
    )
    request_stats_max_iterations: Whole | None = _setting(
        "iterations whose statistics by request are kept", since="0.10", ge=0
    )
    logits_datatype: DataType | None = _setting(
        "type of logits in responses", unset="the engine's logits_dtype"
    )
    prompt_embedding_table_data_type: DataType | None = _setting(
        "type of prompt tables", unset="the engine's dtype"
    )
    encoder_input_features_data_type: DataType = _setting("type of encoder features", "TYPE_FP16")

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> Self:
        """Settings from a serve config, keys without a value left out.

        Raises:
            InvalidPredictorConfig: names every key with its value and rule, and the nearest
                key to one that is unknown.
        """
        given = {name: value for name, value in arguments.items() if value not in (None, "")}
        check_keys(given)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            problems = [_problem(item) for item in error.errors(include_url=False)]
        raise InvalidPredictorConfig("; ".join(problems))

    @classmethod
    def since(cls, name: str) -> Release:
        """The first release whose backend reads a setting."""
        extra: Any = cls.model_fields[name].json_schema_extra
        major, minor = extra["since"].split(".")
        return int(major), int(minor)


def _problem(item: Any) -> str:
    name = str(item["loc"][0])
    rule = rule_of(item, name, list(Parameters.model_fields))
    return f"tensorrt_llm.args.{name}={item['input']!r}: {rule}"


def rule_of(item: Any, name: str, known: Sequence[str]) -> str:
    """The rule that setting `name` breaks, by pydantic's error `item`; `known` settings exist."""
    if item["type"] == "extra_forbidden":
        hint = nearest(name, known)
        return f"unknown setting of a TensorRT-LLM engine{hint}"
    if item["type"] == "literal_error":
        choices = choices_of(Parameters.model_fields[name].annotation)
        return f"must be {' or '.join(choices)}{nearest(str(item['input']), choices)}"
    rule: str = item["msg"]
    return rule.removeprefix("Value error, ").replace("Input should be", "must be")


def choices_of(annotation: Any) -> list[str]:
    """The values of a Literal, also where it may be None."""
    found = get_args(annotation)
    if found and all(isinstance(choice, str) for choice in found):
        return list(found)
    return [choice for part in found for choice in choices_of(part)]
