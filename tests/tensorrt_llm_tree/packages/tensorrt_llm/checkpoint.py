"""A Hugging Face model -> a checkpoint: config.json, and rank{N}.safetensors without tensors."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from tensorrt_llm import fault_injection

# What a format of quantize.py is called in a checkpoint.
ALGORITHMS = {
    "nvfp4": "NVFP4",
    "fp8": "FP8",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_wo": "W8A16",
    "int4_wo": "W4A16",
    "full_prec": None,
}


def convert(args: Namespace, step: str, algorithm: str | None, cache: str | None) -> None:
    """Write what `args` ask for; `algorithm` and `cache` are those of the quantization."""
    source, target = Path(args.model_dir), Path(args.output_dir)
    hub: dict[str, Any] = json.loads((source / "config.json").read_text())
    tp, pp = args.tp_size, args.pp_size
    config = _config(hub, args, algorithm, cache)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=4))
    for rank in range(tp * pp):
        if not fault_injection.loses(step, rank):
            (target / f"rank{rank}.safetensors").write_bytes(shard(source, rank, algorithm))
        fault_injection.between_files(step)


def shard(model_dir: Path, rank: int, algorithm: str | None = None) -> bytes:
    """Bytes in the place of a rank's weights; they differ with those of the model."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{model_dir} has no *.safetensors")
    seed = hashlib.sha256(f"{rank} {algorithm}".encode())
    for file in files:
        seed.update(file.read_bytes())
    return seed.digest() * 1000


def _config(
    hub: dict[str, Any], args: Namespace, algorithm: str | None, cache: str | None
) -> dict[str, Any]:
    tp, pp = args.tp_size, args.pp_size
    dtype = args.dtype
    if dtype == "auto":
        dtype = hub.get("torch_dtype", "float16")
        dtype = "float16" if dtype == "float32" else dtype
    heads = hub.get("n_head") or hub["num_attention_heads"]
    hidden = hub.get("n_embd") or hub["hidden_size"]
    is_gpt2 = hub["model_type"] == "gpt2"
    return {
        "architecture": "GPTForCausalLM" if is_gpt2 else "LlamaForCausalLM",
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": hub["vocab_size"],
        "hidden_size": hidden,
        "num_hidden_layers": hub.get("n_layer") or hub["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": hub.get("num_key_value_heads", heads),
        "head_size": hidden // heads,
        "intermediate_size": hub.get("intermediate_size", 4 * hidden),
        "hidden_act": hub.get("activation_function") or hub["hidden_act"],
        "norm_epsilon": hub.get("layer_norm_epsilon") or hub["rms_norm_eps"],
        "position_embedding_type": "learned_absolute" if is_gpt2 else "rope_gpt_neox",
        "max_position_embeddings": hub.get("n_positions") or hub["max_position_embeddings"],
        "mapping": {
            "world_size": tp * pp,
            "gpus_per_node": 8,
            "cp_size": 1,
            "tp_size": tp,
            "pp_size": pp,
            "moe_tp_size": tp,
            "moe_ep_size": 1,
        },
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": cache},
    }
