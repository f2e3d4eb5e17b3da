"""TensorRT-LLM engine directory: reads config.json, rank files and the tokenizer's end ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cog_triton.artifact import engine_config, engine_manifest
from cog_triton.artifact.engine_config import CONFIG_NAME, TENSORRT_LLM, EngineConfig, LoRABuild
from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.tensorrt_llm import runtime_settings
from cog_triton.engines.tensorrt_llm.adapter_modules import HF_MODULES
from cog_triton.errors import EngineCorrupt, EngineIncompatible, TritonTokenizerError
from cog_triton.text.tokenizer import EngineTokenizer

MAX_LORA_RANK = 64
"""trtllm-build's default of max_lora_rank."""
_RANK = re.compile(r"rank\d+\.engine")
SPECULATIVE = {4: "medusa", 8: "lookahead", 16: "redrafter", 32: "eagle"}
"""Decoding modes of engines that were built for one, by their SpeculativeDecodingMode."""
_OLDEST = (0, 9)


@dataclass(frozen=True, slots=True)
class Engine:
    """TensorRT-LLM engine; the first of `end_ids` is sent as end_id; there may be none.

    `runtime` are the settings that it carries, see `runtime_settings`, and `adapters` the names of
    the LoRA adapters that it was packed with.
    """

    directory: Path
    config: EngineConfig
    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    runtime: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()

    @property
    def release(self) -> tuple[int, int]:
        """TensorRT-LLM's release that built it, under which alone it runs; (0, 0) if unknown."""
        match = re.match(r"(\d+)\.(\d+)", self.config.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def ranks(self) -> int:
        """Number of ranks: processes of one GPU each."""
        return self.config.pretrained_config.mapping.ranks

    @property
    def paged_context(self) -> bool:
        """Whether prefill can start from blocks in the KV cache (paged context FMHA)."""
        limits = self.config.build_config
        return limits.paged_kv_cache and bool(limits.plugin_config.use_paged_context_fmha)

    @property
    def decoding_mode(self) -> str | None:
        """Decoding mode of an engine built for speculative decoding, None for others."""
        return SPECULATIVE.get(self.config.build_config.speculative_decoding_mode or 0)


def matches(directory: Path) -> bool:
    """Whether the manifest says so or, without one, there are config.json and rank*.engine."""
    manifest = engine_manifest.load(directory)
    if manifest is not None:
        return manifest.engine == TENSORRT_LLM
    return (directory / CONFIG_NAME).is_file() and bool(_rank_files(directory))


def read_engine(directory: Path) -> Engine:
    """Read an engine directory.

    Raises:
        EngineCorrupt: a file is missing or broken; names it.
        EngineIncompatible: TensorRT-LLM older than 0.9 built it.
        TritonTokenizerError: there is no usable tokenizer.
    """
    path = directory / CONFIG_NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise EngineCorrupt(f"{path}: cannot be read: {error.strerror}") from error
    config = engine_config.parse(text, str(path))
    ranks = config.pretrained_config.mapping.ranks
    held = _rank_files(directory)
    for rank in range(ranks):
        if f"rank{rank}.engine" not in held:
            raise EngineCorrupt(
                f"{directory}: rank{rank}.engine is missing: config.json says {ranks} ranks"
            )
    if len(held) > ranks:
        raise EngineCorrupt(f"{directory}: {len(held)} rank*.engine, config.json says {ranks}")
    end_ids, pad_id = _special_ids(directory)
    manifest = engine_manifest.load(directory)
    runtime = runtime_settings.of_manifest(manifest, str(directory))
    adapters = tuple(manifest.lora_adapters) if manifest else ()
    engine = Engine(directory, config, end_ids, pad_id, runtime, adapters)
    if engine.release < _OLDEST:
        raise EngineIncompatible(
            f"version={config.version!r} of config.json: TensorRT-LLM 0.9 is the oldest whose"
            " engines are served: build the engine again"
        )
    return engine


def _rank_files(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("rank*.engine") if _RANK.fullmatch(path.name)}


def _special_ids(directory: Path) -> tuple[tuple[int, ...], int | None]:
    """End ids of the tokenizer and of generation_config.json, in this order, and the pad id.

    Chat models name the end of a turn in the first place, and other end tokens in the second.
    """
    tokenizer = EngineTokenizer.load(directory)
    own = None if tokenizer.eos_token is None else tokenizer.token_id(tokenizer.eos_token)
    path = directory / "generation_config.json"
    try:
        found: Any = json.loads(path.read_text("utf-8"))
        eos, pad = found.get("eos_token_id"), found.get("pad_token_id")
    except FileNotFoundError:
        eos = pad = None
    except (OSError, ValueError, AttributeError) as error:
        raise TritonTokenizerError(f"{path}: cannot be read: {error}") from error
    ids = [own, *(eos if isinstance(eos, list) else [eos])]
    for token in (*ids, pad):
        if token is not None and type(token) is not int:
            raise TritonTokenizerError(f"{path}: {token!r} is not a token id")
    ends = tuple(dict.fromkeys(token for token in ids if token is not None))
    return ends, pad if pad is not None else next(iter(ends), None)


def adapter_limits(config: EngineConfig, directory: Path) -> LoRALimits:
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
