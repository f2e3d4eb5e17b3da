"""Required files of an engine, by its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cog_triton.artifact.engine_config import CONFIG_NAME, CPU_FAMILIES, EngineConfig

# Before 0.8 names begin with the model's, as in gpt_float16_tp1_rank0.engine.
_RANK = re.compile(r"(?:.+_)?rank(0|[1-9]\d{0,5})\.engine")


def problem(config: EngineConfig, sizes: Mapping[str, int]) -> str | None:
    """The first problem of an engine with files of `sizes` (bytes, by name), None if there is none.

    TensorRT-LLM needs one engine file for each rank, and no more.
    """
    if config.engine in CPU_FAMILIES:
        needed = ["openvino_model.xml", "openvino_model.bin"]
        rule = "every OpenVINO engine has it"
    else:
        mapping = config.pretrained_config.mapping
        held = {int(match[1]): match[0] for match in map(_RANK.fullmatch, sizes) if match}
        rule = (
            f"{CONFIG_NAME} says tp {mapping.tp_size} x pp {mapping.pp_size} x cp"
            f" {mapping.cp_size} = {mapping.ranks}, there are {len(held)} rank*.engine"
        )
        if len(held) > mapping.ranks:
            return f"{held[max(held)]} is one too many: {rule}"
        # A config that says a billion would make a billion names.
        ranks = range(min(mapping.ranks, len(held) + 1))
        needed = [held.get(rank, f"rank{rank}.engine") for rank in ranks]
    for name in needed:
        if name not in sizes:
            return f"{name} is missing: {rule}"
        if not sizes[name]:
            return f"{name} is empty"
    return None
