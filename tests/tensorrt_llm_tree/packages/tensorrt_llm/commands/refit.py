"""``trtllm-refit``: an engine gets other weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tensorrt_llm import engine, fault_injection
from tensorrt_llm.command_line import parser_of


def main() -> None:
    args = parser_of("trtllm-refit").parse_args()
    engines, checkpoint = Path(args.engine_dir or ""), Path(args.checkpoint_dir or "")
    for option, given in (("engine_dir", engines), ("checkpoint_dir", checkpoint)):
        if not (given / "config.json").is_file():
            raise RuntimeError(f"Please supply a valid --{option} (found `{given}`)")
    built = json.loads((engines / "config.json").read_text())["pretrained_config"]
    wanted = engine.read_checkpoint(checkpoint)
    if built["architecture"] != wanted["architecture"]:
        raise RuntimeError("Engine Architecture and Checkpoint Architecture do not match.")
    target = Path(args.output_dir)
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(engines / "config.json", target / "config.json")
    for path in sorted(engines.glob("*.engine")):
        shard = (checkpoint / f"{path.stem}.safetensors").read_bytes()
        (target / path.name).write_bytes(engine.refit(path.read_bytes(), shard))
        print(f"[TRT-LLM] [I] Writing refitted engine to `{target / path.name}`", flush=True)
        fault_injection.between_files("trtllm-refit")
