"""Which LoRA adapters a TensorRT-LLM engine takes: by its config.json, or before it is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cog_triton.artifact.engine_config import CONFIG_NAME, EngineConfig, LoRABuild
from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.tensorrt_llm.adapter_modules import HF_MODULES
from cog_triton.errors import EngineIncompatible

MAX_LORA_RANK = 64
"""trtllm-build's default of max_lora_rank."""


def of_engine(config: EngineConfig, directory: Path) -> LoRALimits:
    """What adapters the engine in `directory` takes, whose `config` it is.

    Raises:
        EngineIncompatible: it takes none; says why.
    """
    build, model = config.build_config, config.pretrained_config
    where = directory / CONFIG_NAME
    if not build.plugin_config.lora_plugin:
        raise EngineIncompatible(
            f"{where}: the engine takes no LoRA adapters: build it with lora_plugin"
        )
    if model.dtype != "float16":
        raise EngineIncompatible(
            f"{where}: dtype={model.dtype}: TensorRT-LLM takes adapters of the model's own type"
            " alone, and its Triton model has lora_weights in FP16: build with dtype float16"
        )
    lora = build.lora_config or LoRABuild()
    return LoRALimits(
        max_rank=lora.max_lora_rank or MAX_LORA_RANK,
        max_loras=build.max_batch_size,
        modules=modules_of(lora.lora_target_modules),
        hidden_size=model.hidden_size,
        layers=model.num_hidden_layers,
    )


def modules_of(targets: Sequence[str]) -> frozenset[str]:
    """Adapters' names of the modules that `targets` are in TensorRT-LLM; all, if it names none."""
    found = [HF_MODULES[name] for name in targets if name in HF_MODULES]
    return frozenset(found or HF_MODULES.values())
