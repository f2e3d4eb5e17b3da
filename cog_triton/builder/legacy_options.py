"""Legacy options: one rule for each option of TensorRT-LLM's legacy scripts.

The options are those of 0.5.0 to 0.7.1 (``examples/{gpt,llama}/build.py``, ``hf_*_convert.py``) and
of trtllm-build and convert_checkpoint.py of 0.7.1 to 0.17; what replaced them is what the release
notes of 0.8 to 0.17 say and what the scripts of 1.x have. An option is named with underscores here,
and a config may have dashes.
"""

from __future__ import annotations

from cog_triton.builder import legacy_rules as rules
from cog_triton.builder.legacy_rules import (
    CONVERTED_RANKS,
    DTYPE,
    OFF,
    ON,
    PAGED,
    PLUGIN,
    SAFETENSORS,
    WEIGHTS,
    WORD,
    Derived,
    Dropped,
    Moved,
    Refused,
    Role,
    Rule,
)

Rules = dict[str, Rule]


def _table(*rows: tuple[str, Rule]) -> Rules:
    return {name: rule for names, rule in rows for name in names.split()}


_OWN = Dropped("the model's own, which the old script took as well")
_FP8 = Refused("FP8 checkpoints come from quantize.py with qformat fp8")
_SHARED = Dropped("embeddings are shared by themselves since 0.16")
_SERVER = "the server's setting enable_context_fmha_fp32_acc since 0.12"
_ROPE = Refused("position embeddings are as the model's config.json has them")
_TYPED = Dropped("always on since 0.11")
_REDRAFTER = Refused(
    "redrafter's script of today reads base_model_checkpoint_dir, which llama's makes in"
    " a step before"
)
_STREAMING = Refused("trtllm-build has streamingllm instead")
_SIZES = "n_positions vocab_size n_layer n_head n_kv_head n_embd inter_size hidden_act rms_norm_eps"
_CHECKPOINT = Derived(
    "`checkpoint_dir`, the output of the convert step; if there is none, `model_dir` of a new one",
    rules.model_dir,
)

HF_CONVERT = _table(
    ("in_file i", Moved("convert", "model_dir")),
    ("out_dir o", Derived("`output_dir`, as the step has it", rules.output_dir)),
    (" ".join(CONVERTED_RANKS[:2]), Moved("convert", "tp_size")),
    ("storage_type", Moved("convert", "dtype", DTYPE)),
    ("t", Refused("it may be storage-type or tensor-parallelism")),
    ("processes p", Moved("convert", "workers")),
    (
        "calibrate_kv_cache kv",
        Derived("left out: `int8_kv_cache` of the build step decides", rules.calibrate_kv_cache),
    ),
    (
        "smoothquant sq",
        Derived("`smoothquant`; refused if build.py was not to use it", rules.smoothquant),
    ),
    ("model", Moved("convert", "gpt_variant")),
    ("multi_query_mode mq", _OWN),
    ("dataset_cache_dir", Moved("convert", "dataset_cache_dir")),
    ("load_model_on_cpu convert_model_on_cpu", Moved("convert", "load_model_on_cpu")),
)
"""hf_gpt_convert.py, hf_llama_convert.py and their like; every other option is refused."""

CONVERT_CHECKPOINT = _table(
    ("storage_type t", Moved("convert", "dtype", DTYPE)),
    ("i", Moved("convert", "model_dir")),
    ("o", Derived("`output_dir`, as the step has it", rules.output_dir)),
    ("sq", Moved("convert", "smoothquant")),
    ("kv calibrate_kv_cache", Moved("convert", "int8_kv_cache")),
    ("ammo_quant_ckpt_path modelopt_quant_ckpt_path", Moved("convert", "quant_ckpt_path")),
    ("use_embedding_sharing", _SHARED),
    ("hf_lora_dir", Moved("build", "lora_dir")),
    ("use_prompt_tuning", Refused("max_prompt_embedding_table_size of the build step since 0.9")),
    (
        "max_prompt_embedding_table_size max_multimodal_len",
        Moved("build", "max_prompt_embedding_table_size"),
    ),
    ("lora_target_modules", Moved("build", "lora_target_modules")),
    ("max_lora_rank", Moved("build", "max_lora_rank")),
    (_SIZES, _OWN),
    ("model_type qwen_type ckpt_type", Dropped("today's scripts read it from the model's files")),
    ("rotary_base rotary_scaling", _ROPE),
    ("moe_num_experts moe_top_k moe_renorm_mode", Refused("the model's own")),
    (
        "moe_tp_mode",
        Derived("`moe_ep_size` for 1, experts whole; left out for 2", rules.moe_tp_mode),
    ),
    ("enable_fp8", _FP8),
    ("enable_pos_shift dense_context_fmha", _STREAMING),
    ("use_parallel_embedding embedding_sharding_dim", Refused("this script splits no embeddings")),
    (
        "weight_data_type",
        Derived("`dtype`; left out if `dtype` is given, too", rules.weight_data_type),
    ),
    (
        "fixed_num_medusa_heads",
        Derived("`num_medusa_heads`, before which it came", rules.fixed_num_medusa_heads),
    ),
    ("model_dir", _REDRAFTER),
    ("skip_cross_qkv", Moved("convert", "skip_cross_kv")),
    ("world_size", Dropped("tp_size and pp_size say it")),
    ("load_nemo_on_gpu", Dropped("it changed where weights are loaded, and nothing in them")),
    ("dataset_cache_dir", Refused("this script has none: set HF_DATASETS_CACHE in env")),
    ("save_config_only", Refused("an engine needs the weights")),
)
"""Options of convert_checkpoint.py before 0.17, where today's lacks them; every other stays."""

QUANTIZE = _table(
    ("max_seq_length", Moved("quantize", "tokenizer_max_seq_length")),
    ("weight_compression", Refused("auto_quantize_bits, in bits of a weight, has its place")),
    ("strongly_typed", _TYPED),
)
"""Options that quantize.py had before 0.17; every other stays."""

TRTLLM_BUILD = _table(
    (
        "max_output_len",
        Derived("`max_seq_len`, its sum with `max_input_len` (0.12)", rules.max_output_len),
    ),
    (
        "paged_kv_cache",
        Moved("build", "kv_cache_type", PAGED),
    ),
    ("use_gpt_attention_plugin", Moved("build", "gpt_attention_plugin", PLUGIN)),
    ("use_gemm_plugin", Moved("build", "gemm_plugin", PLUGIN)),
    ("use_lookup_plugin lookup_plugin", _SHARED),
    ("enable_context_fmha", Moved("build", "context_fmha", WORD)),
    ("enable_context_fmha_fp32_acc", Refused(_SERVER)),
    ("context_fmha_fp32_acc", Dropped(_SERVER, OFF)),
    ("multi_block_mode", Dropped("the server's setting since 0.12, and on by itself", ON)),
    ("enable_xqa", Dropped("there is no choice since 0.16")),
    ("use_custom_all_reduce", Dropped("chosen when it runs, since 0.12")),
    ("use_context_fmha_for_generation", Dropped("it was for tests, until 0.11", OFF)),
    ("attention_qk_half_accumulation", Dropped("there is none since 0.11", OFF)),
    ("tp_size", Moved("convert", "tp_size")),
    ("pp_size", Moved("convert", "pp_size")),
    ("cp_size", Moved("convert", "cp_size")),
    (
        "weight_only_precision",
        Moved("convert", "weight_only_precision", WEIGHTS),
    ),
    ("strongly_typed strongly_type", _TYPED),
    ("use_fused_mlp", Moved("build", "use_fused_mlp", WORD)),
    ("builder_opt", Dropped("there is none since 0.14: how long TensorRT looks for a better plan")),
    ("builder_force_num_profiles", Refused("the variable BUILDER_FORCE_NUM_PROFILES of env")),
    ("timing_cache", Moved("build", "input_timing_cache")),
    ("auto_parallel", Dropped("tp_size and pp_size of the convert step say it", (1,))),
    ("cluster_key", Dropped("it was for auto_parallel")),
    ("gpus_per_node", Dropped("it was for auto_parallel")),
)
"""Options that trtllm-build had before 0.17; every other stays."""

BUILD_PY = TRTLLM_BUILD | _table(
    ("model_dir bin_model_dir ft_model_dir", _CHECKPOINT),
    ("meta_ckpt_dir", Moved("convert", "meta_ckpt_dir")),
    (
        "quant_ckpt_path",
        Moved("convert", "quant_ckpt_path", SAFETENSORS),
    ),
    ("output_dir", Derived("`output_dir`, as the step has it", rules.output_dir)),
    ("dtype", Moved("convert", "dtype", DTYPE)),
    (
        "world_size",
        Derived("`tp_size` of the convert step, unless the build step has it", rules.world_size),
    ),
    ("parallel_build", Derived("`workers`, one for each rank", rules.parallel_build)),
    ("use_inflight_batching", Dropped("always on, with packed input and a paged KV cache")),
    ("use_paged_context_fmha", Moved("build", "use_paged_context_fmha", WORD)),
    ("remove_input_padding", Moved("build", "remove_input_padding", WORD)),
    ("use_lora_plugin", Moved("build", "lora_plugin", PLUGIN)),
    ("hf_lora_dir", Moved("build", "lora_dir")),
    ("use_layernorm_plugin use_rmsnorm_plugin", Dropped("there are none since 0.8")),
    (
        "use_smooth_quant",
        Derived("left out: `smoothquant` of the convert step", rules.use_smooth_quant),
    ),
    *(
        (name, Moved("convert", name))
        for name in (
            "use_weight_only",
            "disable_weight_only_quant_plugin",
            "int8_kv_cache",
            "per_channel",
            "per_token",
            "per_group",
            "group_size",
            "load_by_shard",
            "use_parallel_embedding",
            "embedding_sharding_dim",
        )
    ),
    *(
        (name, Moved("build", name))
        for name in (
            "max_batch_size",
            "max_input_len",
            "max_beam_width",
            "max_num_tokens",
            "max_prompt_embedding_table_size",
            "tokens_per_block",
            "logits_dtype",
            "gather_all_token_logits",
            "lora_target_modules",
            "profiling_verbosity",
            "log_level",
            "enable_debug_output",
        )
    ),
    ("use_embedding_sharing", _SHARED),
    ("random_seed", Dropped("weights are never random")),
    (_SIZES, _OWN),
    ("multiple_of ffn_dim_multiplier multi_query_mode no_bias", _OWN),
    ("rotary_base rotary_pct rotary_scaling", _ROPE),
    ("moe_num_experts moe_top_k moe_tp_mode moe_renorm_mode", Refused("the model's own")),
    ("enable_fp8 fp8_kv_cache quantized_fp8_model_path", _FP8),
    ("max_draft_len", Refused("it needs trtllm-build's speculative_decoding_mode")),
    ("enable_pos_shift dense_context_fmha", _STREAMING),
    ("gpus_per_node", Refused("ranks are placed where the engine is served")),
    ("visualize", Refused("trtllm-build's visualize_network names a directory")),
)
"""build.py of gpt and llama, and of others as far as they are alike; no other is known."""


def markdown() -> str:
    """The tables of docs/build.md."""
    own = {name: rule for name, rule in BUILD_PY.items() if name not in TRTLLM_BUILD}
    parts: tuple[tuple[str, Rules, Role], ...] = (
        ("hf_gpt_convert.py, hf_llama_convert.py and their like", HF_CONVERT, "convert"),
        ("build.py", own, "build"),
        ("build.py, and trtllm-build before 0.17", TRTLLM_BUILD, "build"),
        ("convert_checkpoint.py before 0.17", CONVERT_CHECKPOINT, "convert"),
        ("quantize.py before 0.17", QUANTIZE, "quantize"),
    )
    return "\n".join(f"### {title}\n\n{_rows(part, role)}" for title, part, role in parts)


def _rows(part: Rules, role: Role) -> str:
    """One row for all options with the same translation."""
    names: dict[str, list[str]] = {}
    for name, rule in part.items():
        names.setdefault(rule.text(name, role), []).append(f"`{name}`")
    rows = [f"| {', '.join(group)} | {text} |" for text, group in names.items()]
    return "\n".join(["| option | today |", "|---|---|", *rows, ""])
