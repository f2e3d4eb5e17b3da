"""Converts a Hugging Face GPT-2 as TensorRT-LLM did before 0.8: a file of each rank."""

from __future__ import annotations

import configparser
import json
from argparse import Namespace
from pathlib import Path

from tensorrt_llm.checkpoint import shard
from tensorrt_llm.command_line import parser_of


def convert(args: Namespace) -> None:
    source, ranks = Path(args.in_file), args.tensor_parallelism
    target = Path(args.out_dir) / f"{ranks}-gpu"
    target.mkdir(parents=True, exist_ok=True)
    hub = json.loads((source / "config.json").read_text())
    described = configparser.ConfigParser()
    described["gpt"] = {key: str(value) for key, value in {**vars(args), **hub}.items()}
    described["gpt"]["storage_dtype"] = args.storage_type
    with (target / "config.ini").open("w") as file:
        described.write(file)
    for rank in range(ranks):
        (target / f"model.{rank}.bin").write_bytes(shard(source, rank))


if __name__ == "__main__":
    given = parser_of("gpt/hf_gpt_convert.py").parse_args()
    print("\n=============== Arguments ===============")
    for key, value in vars(given).items():
        print(f"{key}: {value}")
    print("========================================")
    convert(given)
