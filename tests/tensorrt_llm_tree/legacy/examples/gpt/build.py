"""Builds engines as TensorRT-LLM did before 0.8: config.json has no version."""

from __future__ import annotations

import configparser
import json
from argparse import Namespace
from pathlib import Path

from tensorrt_llm.command_line import parser_of


def build(args: Namespace) -> None:
    source, target = Path(args.model_dir), Path(args.output_dir)
    converted = configparser.ConfigParser()
    converted.read(source / "config.ini")
    model = converted["gpt"]
    dtype = model["storage_dtype"]
    if args.world_size != int(model["tensor_parallelism"]):
        raise ValueError(f"world_size {args.world_size}: {source} is for another number of GPUs")
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "builder_config": {
            "name": "gpt",
            "precision": dtype,
            "tensor_parallel": args.world_size,
            "num_layers": int(model["n_layer"]),
            "num_heads": int(model["n_head"]),
            "num_kv_heads": int(model["n_head"]),
            "hidden_size": int(model["n_embd"]),
            "vocab_size": int(model["vocab_size"]),
            "hidden_act": model["activation_function"],
            "max_position_embeddings": int(model["n_positions"]),
            "max_batch_size": args.max_batch_size,
            "max_beam_width": args.max_beam_width,
            "max_input_len": args.max_input_len,
            "max_output_len": args.max_output_len,
            "int8": False,
            "quant_mode": 0,
        },
        "plugin_config": {
            "gpt_attention_plugin": args.use_gpt_attention_plugin,
            "gemm_plugin": args.use_gemm_plugin,
            "remove_input_padding": args.remove_input_padding,
            "paged_kv_cache": args.paged_kv_cache,
            "tokens_per_block": args.tokens_per_block,
        },
    }
    (target / "config.json").write_text(json.dumps(config, indent=4))
    for rank in range(args.world_size):
        weights = sorted(source.glob(f"*.{rank}.bin"))
        engine = b"".join(path.read_bytes() for path in weights)
        (target / f"gpt_{dtype}_tp{args.world_size}_rank{rank}.engine").write_bytes(engine)
    (target / "model.cache").write_bytes(b"")


if __name__ == "__main__":
    build(parser_of("gpt/build.py").parse_args())
