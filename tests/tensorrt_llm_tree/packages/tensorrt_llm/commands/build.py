"""``trtllm-build``: a checkpoint becomes an engine."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from tensorrt_llm import engine
from tensorrt_llm.command_line import parser_of

_SAME = (
    "max_batch_size",
    "max_beam_width",
    "max_num_tokens",
    "opt_num_tokens",
    "max_prompt_embedding_table_size",
    "gather_context_logits",
    "gather_generation_logits",
    "profiling_verbosity",
    "weight_sparsity",
    "weight_streaming",
    "max_draft_len",
    "monitor_memory",
)
# tensorrt_llm/models/modeling_utils.py: SpeculativeDecodingMode.
_SPECULATIVE = {
    None: 1,
    "draft_tokens_external": 2,
    "medusa": 4,
    "lookahead_decoding": 8,
    "explicit_draft_tokens": 16,
    "eagle": 32,
}
_PLUGINS = (
    "gpt_attention_plugin",
    "gemm_plugin",
    "lora_plugin",
    "remove_input_padding",
    "context_fmha",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "multiple_profiles",
    "reduce_fusion",
)


def main() -> None:
    args = parser_of("trtllm-build").parse_args()
    checkpoint = Path(args.checkpoint_dir)
    config = engine.read_checkpoint(checkpoint)
    print("[TRT-LLM] [I] Set gpt_attention_plugin to auto.", flush=True)
    engine.write(
        "trtllm-build",
        checkpoint,
        Path(args.output_dir),
        _build_config(args, config),
        weights=not args.strip_plan,
    )
    print("[TRT-LLM] [I] Total time of building all engines: 00:00:00", flush=True)


def _build_config(args: Namespace, config: dict[str, Any]) -> dict[str, Any]:
    longest = args.max_seq_len or config["max_position_embeddings"]
    plugins = {name: _plugin(getattr(args, name)) for name in _PLUGINS if hasattr(args, name)}
    return {
        "max_input_len": min(args.max_input_len, longest),
        "max_seq_len": longest,
        **{name: getattr(args, name) for name in _SAME if hasattr(args, name)},
        "kv_cache_type": getattr(args, "kv_cache_type", "PAGED").upper(),
        "speculative_decoding_mode": _SPECULATIVE[args.speculative_decoding_mode],
        "lora_config": {
            "lora_dir": args.lora_dir or [],
            "max_lora_rank": args.max_lora_rank,
            "lora_target_modules": args.lora_target_modules or [],
        },
        "strongly_typed": True,
        "use_refit": False,
        "use_strip_plan": args.strip_plan,
        "plugin_config": {"dtype": config["dtype"], **plugins},
    }


def _plugin(value: Any) -> Any:
    return {"enable": True, "disable": None}.get(value, value)
