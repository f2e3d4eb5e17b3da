"""Setting rules: what settings require of each other, of the engine and of its release.

The backend answers most violations with a warning and other behaviour than requested; here they
are refused before it starts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from cog_triton.engines.tensorrt_llm.backend_settings import Parameters, notation
from cog_triton.engines.tensorrt_llm.engine_directory import Engine
from cog_triton.engines.tensorrt_llm.releases import format_release
from cog_triton.errors import InvalidPredictorConfig
from cog_triton.settings.environment_types import IMAGE_ENGINE_DIR

Problems = Iterator[tuple[str, str]]
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
_TOKENIZER_INFO = ("encoded_vocab", "tokenizer_str", "stop_token_ids")
DATA_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}


def check(parameters: Parameters, engine: Engine, own: Collection[str] = ()) -> None:
    """Raise E1202 naming every setting that cannot be honoured, with its value and the rule.

    `parameters` are resolved: see `render_config.resolve_defaults`. `own` are the names of those
    that the engine carries itself.
    """
    broken = [
        f"tensorrt_llm.args.{name}={shown}: {rule}"
        + ("; it is one that the engine carries, and a serve config overrides" * (name in own))
        for name, shown, rule in problems(parameters, engine)
    ]
    if broken:
        raise InvalidPredictorConfig("; ".join(broken))


def problems(parameters: Parameters, engine: Engine) -> Iterator[tuple[str, str, str]]:
    """Every setting that cannot be honoured: its name, its value and the rule, see `check`."""
    for rules in (_release, _batching, _cache, _parallel, _decoding, _guided, _lora, _types):
        for name, rule in rules(parameters, engine):
            yield name, _shown(parameters, name), rule


def _shown(parameters: Parameters, name: str) -> str:
    value: Any = getattr(parameters, name)
    return repr(value if isinstance(value, bool | int | float | None) else notation(name, value))


def _release(parameters: Parameters, engine: Engine) -> Problems:
    contract = engine.contract
    for name in parameters.model_fields_set:
        since = Parameters.since(name)
        if contract.release < since:
            yield (
                name,
                f"TensorRT-LLM {contract.version} has no such setting; it came with"
                f" {format_release(since)}",
            )
    mode = parameters.decoding_mode
    if mode is not None and not contract.has_decoding_mode(mode):
        yield "decoding_mode", f"TensorRT-LLM {contract.version} has no such mode"
    if parameters.batching_strategy.lower() == "v1" and not contract.static_batching:
        yield (
            "batching_strategy",
            f"TensorRT-LLM {format_release(contract.release)} has no static batching any more:"
            " must be inflight_fused_batching",
        )


def _batching(parameters: Parameters, engine: Engine) -> Problems:
    limits = engine.config.build_config
    if (parameters.triton_max_batch_size or 0) > limits.max_batch_size:
        yield (
            "triton_max_batch_size",
            f"must not be above the engine's max_batch_size, {limits.max_batch_size}",
        )
    if parameters.max_beam_width > (limits.max_beam_width or 1):
        yield (
            "max_beam_width",
            f"must not be above the engine's max_beam_width, {limits.max_beam_width or 1}",
        )
    if parameters.enable_chunked_context and not engine.paged_context:
        yield "enable_chunked_context", _needs_paged_context(engine)
    if parameters.cuda_graph_cache_size and not parameters.cuda_graph_mode:
        yield "cuda_graph_cache_size", "needs cuda_graph_mode true"


def _needs_paged_context(engine: Engine) -> str:
    limits = engine.config.build_config
    return (
        "needs an engine built with a paged KV cache and use_paged_context_fmha; this one has"
        f" paged KV cache {limits.paged_kv_cache} and use_paged_context_fmha"
        f" {bool(limits.plugin_config.use_paged_context_fmha)}"
    )


def _cache(parameters: Parameters, engine: Engine) -> Problems:
    if parameters.enable_kv_cache_reuse and not engine.paged_context:
        yield "enable_kv_cache_reuse", _needs_paged_context(engine)
    if parameters.kv_cache_host_memory_bytes and not parameters.enable_kv_cache_reuse:
        yield "kv_cache_host_memory_bytes", "needs enable_kv_cache_reuse true"
    if min(parameters.max_attention_window_size or (1,)) < 1:
        yield "max_attention_window_size", "must be 1 or more"
    encoder = parameters.encoder_engine_dir
    if encoder is not None and not encoder.is_dir():
        yield "encoder_engine_dir", "no such directory"
    if encoder is not None and parameters.cross_kv_cache_fraction is None:
        yield "encoder_engine_dir", "needs cross_kv_cache_fraction"
    if encoder is None and parameters.cross_kv_cache_fraction is not None:
        yield "cross_kv_cache_fraction", "needs encoder_engine_dir"


def _parallel(parameters: Parameters, engine: Engine) -> Problems:
    served = engine.directory.resolve()
    if parameters.engine_dir not in (None, IMAGE_ENGINE_DIR):
        assert parameters.engine_dir is not None
        if parameters.engine_dir.resolve() != served:
            yield "engine_dir", f"{served} is served: say which by ENGINE_DIR or COG_WEIGHTS"
    nodes, ranks = parameters.num_nodes, engine.ranks
    if ranks % nodes:
        yield "num_nodes", f"the engine has {ranks} ranks, which must be equally many on each"
    count = max(ranks // nodes, 1)
    for group in parameters.gpu_device_ids or ():
        if len(set(group)) != count or len(group) != count or min(group) < 0:
            rule = f"must be {count} different ids, of 0 or more, for each instance"
            yield "gpu_device_ids", rule
            break
    if (
        parameters.gpu_weights_percent or 1
    ) < 1 and not engine.config.build_config.weight_streaming:
        yield "gpu_weights_percent", "below 1 needs an engine built with weight_streaming"


def _decoding(parameters: Parameters, engine: Engine) -> Problems:
    mode, own = parameters.decoding_mode, engine.decoding_mode
    if mode != own and (own or mode in ("medusa", "redrafter", "lookahead", "eagle")):
        built = own or "none of the speculative ones"
        yield "decoding_mode", f"the engine was built for {built} (speculative_decoding_mode)"
    if mode == "beam_search" and parameters.max_beam_width == 1:
        yield "decoding_mode", "needs max_beam_width above 1"
    if mode not in (None, "beam_search") and parameters.max_beam_width > 1:
        yield "decoding_mode", f"has no beams, and max_beam_width is {parameters.max_beam_width}"
    for name, wanted in (("medusa_choices", "medusa"), ("eagle_choices", "eagle")):
        if getattr(parameters, name) is not None and mode != wanted:
            yield name, f"needs an engine built for {wanted}"
    for name in _LOOKAHEAD:
        missing = getattr(parameters, name) is None
        if missing and mode == "lookahead":
            yield name, "must be set for an engine built for lookahead"
        if not missing and mode != "lookahead":
            yield name, "needs an engine built for lookahead"


def _guided(parameters: Parameters, engine: Engine) -> Problems:
    if parameters.tokenizer_dir is not None:
        yield "tokenizer_dir", "is not read by the backend: see xgrammar_tokenizer_info_path"
    backend, info = parameters.guided_decoding_backend, parameters.xgrammar_tokenizer_info_path
    if backend is not None and info is None:
        yield "guided_decoding_backend", "needs xgrammar_tokenizer_info_path"
    if backend is not None and parameters.max_beam_width > 1:
        yield "guided_decoding_backend", "cannot be used with beams; max_beam_width must be 1"
    if info is None:
        return
    if backend is None:
        yield "xgrammar_tokenizer_info_path", "needs guided_decoding_backend xgrammar"
    try:
        content = json.loads((engine.directory / info).read_text("utf-8"))
        missing = [key for key in _TOKENIZER_INFO if key not in content]
    except (OSError, ValueError, TypeError) as error:
        yield "xgrammar_tokenizer_info_path", f"cannot be read: {error}"
    else:
        if missing:
            yield "xgrammar_tokenizer_info_path", f"has no {', '.join(missing)}"


def _lora(parameters: Parameters, engine: Engine) -> Problems:
    given = sorted(name for name in parameters.model_fields_set if name.startswith("lora_"))
    if not engine.config.build_config.plugin_config.lora_plugin:
        for name in given:
            yield name, "needs an engine built with lora_plugin"
    optimal = parameters.lora_cache_optimal_adapter_size or 8
    largest = parameters.lora_cache_max_adapter_size or 64
    if optimal > largest:
        name = "lora_cache_optimal_adapter_size"
        yield (
            name if name in given else "lora_cache_max_adapter_size",
            f"lora_cache_optimal_adapter_size, {optimal}, must not be above"
            f" lora_cache_max_adapter_size, {largest}",
        )
    folder = parameters.lora_prefetch_dir
    if folder is not None and not folder.is_dir():
        yield "lora_prefetch_dir", "no such directory"


def _types(parameters: Parameters, engine: Engine) -> Problems:
    model = engine.config.pretrained_config
    for name, kind in (
        ("logits_datatype", model.logits_dtype),
        ("prompt_embedding_table_data_type", model.dtype),
    ):
        expected = DATA_TYPES.get(kind)
        if expected is not None and getattr(parameters, name) != expected:
            yield name, f"must be {expected}: the engine's is {kind}"
