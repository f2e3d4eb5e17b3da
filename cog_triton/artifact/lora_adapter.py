"""LoRA adapter: a directory as PEFT writes it, read and checked against the base model.

Only safetensors are read: a pickle (.bin, .pt) may run code when it is loaded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.artifact.safetensors_file import TensorEntry, read_header
from cog_triton.errors import EngineCorrupt, EngineIncompatible

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""All that an engine gets of an adapter."""
CONVERTED_FILES = ("model.lora_weights.npy", "model.lora_config.npy")
"""What engine.tar has beside them: the adapter as TensorRT-LLM takes it, by its names for that."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_CONFIG = 1 << 20
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# What changes the text and no engine here computes: the keys of adapter_config.json, and the
# values that turn them off.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, {}),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, [], {}),
}
_FROM_HIDDEN = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"}
)
_TO_HIDDEN = frozenset({"o_proj", "down_proj"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRALimits:
    """What adapters an engine takes; None is not known, and not checked.

    `modules` are last parts of module names, such as ``q_proj``. `max_loras` is the number of
    adapters that one step of the engine may use.
    """

    max_rank: int
    max_loras: int
    modules: frozenset[str] | None = None
    hidden_size: int | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """One adapted weight W + `scale` * up @ down: `down` is [rank, in], `up` [out, rank]."""

    name: str
    down: TensorEntry
    up: TensorEntry
    scale: float

    @property
    def kind(self) -> str:
        """The last part of the name, such as ``q_proj``."""
        return self.name.rpartition(".")[2]

    @property
    def layer(self) -> int | None:
        """The layer's number, None outside of layers."""
        found = _LAYER.search(self.name)
        return int(found[1]) if found else None

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """An adapter; `base_model` is what it was trained on, as its config names that."""

    directory: Path
    modules: tuple[LoRAModule, ...]
    base_model: str | None

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(module.rank for module in self.modules)


def read_adapter(directory: Path) -> LoRAAdapter:
    """Read an adapter, whose weights stay in their file.

    Raises:
        EngineCorrupt: a file is missing or broken, or the weights are a pickle; names it.
        EngineIncompatible: it is more than LoRA; names the key.
    """
    weights = directory / WEIGHTS_FILE
    if not weights.is_file():
        held = sorted(directory.iterdir()) if directory.is_dir() else []
        pickled = next((path.name for path in held if path.suffix in _PICKLES), None)
        if pickled is None:
            raise EngineCorrupt(f"{weights}: missing; an adapter is {' and '.join(FILES)}")
        raise EngineCorrupt(
            f"{directory / pickled}: a pickle may run code when it is read, so it is not; save the"
            f" adapter as {WEIGHTS_FILE}"
        )
    config = _read_config(directory / CONFIG_FILE)
    modules = tuple(_modules(weights, config, directory / CONFIG_FILE))
    base = config.get("base_model_name_or_path")
    return LoRAAdapter(directory, modules, base if isinstance(base, str) else None)


def check_adapter(adapter: LoRAAdapter, limits: LoRALimits) -> None:
    """Check an adapter against what the engine takes; raises E1305 naming the first mismatch."""
    for module in adapter.modules:
        if rule := _broken_rule(module, limits):
            base = f"; it is of {adapter.base_model[:80]!r}" if adapter.base_model else ""
            raise EngineIncompatible(f"{adapter.directory}: {module.name}: {rule}{base}")


def _broken_rule(module: LoRAModule, limits: LoRALimits) -> str | None:
    if module.rank > limits.max_rank:
        return f"rank {module.rank}; the engine takes at most {limits.max_rank}"
    if limits.modules is not None and module.kind not in limits.modules:
        return f"the engine takes adapters of {', '.join(sorted(limits.modules))} only"
    if limits.layers is not None and module.layer is not None and module.layer >= limits.layers:
        return f"the base model has {limits.layers} layers"
    hidden = limits.hidden_size
    if hidden is None:
        return None
    if module.kind in _FROM_HIDDEN and module.down.shape[1] != hidden:
        return f"takes {module.down.shape[1]} values; the base model's hidden size is {hidden}"
    if module.kind in _TO_HIDDEN and module.up.shape[0] != hidden:
        return f"gives {module.up.shape[0]} values; the base model's hidden size is {hidden}"
    return None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_CONFIG + 1)
        config = json.loads(raw) if len(raw) <= _MAX_CONFIG else None
    except (OSError, ValueError, RecursionError) as error:
        raise EngineCorrupt(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise EngineCorrupt(f"{path}: must be a JSON object of at most {_MAX_CONFIG} bytes")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise EngineCorrupt(f"{path}: r={rank!r}: must be a whole number, at least 1")
    if not _is_number(alpha):
        raise EngineCorrupt(f"{path}: lora_alpha={alpha!r}: must be a number")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise EngineCorrupt(f"{path}: {key}: must be an object")
    for key, off in _OFF.items():
        if config.get(key, off[0]) not in off:
            raise EngineIncompatible(f"{path}: {key}={str(config[key])[:80]}: not supported")
    return config


def _modules(weights: Path, config: Mapping[str, Any], where: Path) -> Iterator[LoRAModule]:
    sides: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in read_header(weights).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise EngineIncompatible(
                f"{weights}: {name[:120]}: is not lora_A or lora_B of a module"
            )
        if len(entry.shape) != 2:
            raise EngineIncompatible(f"{weights}: {name[:120]}: must have two dimensions")
        sides.setdefault(match["module"], {})[match["side"]] = entry
    if not sides:
        raise EngineCorrupt(f"{weights}: has no tensors")
    for module, pair in sides.items():
        if len(pair) != 2:
            raise EngineCorrupt(f"{weights}: {module[:120]}: has no lora_{'AB'['A' in pair]}")
        rank = pair["A"].shape[0]
        stated = _of_pattern(config.get("rank_pattern"), module, config["r"])
        if rank != pair["B"].shape[1] or rank != stated:
            raise EngineCorrupt(
                f"{weights}: {module[:120]}: has rank {rank} and {pair['B'].shape[1]}, {where.name}"
                f" says {stated}"
            )
        alpha = _of_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
        if not _is_number(alpha):
            raise EngineCorrupt(f"{where}: alpha_pattern: {alpha!r} is not a number")
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        yield LoRAModule(module, pair["A"], pair["B"], alpha / divisor)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _of_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """A module's own value, as PEFT finds it: by the end of its name.

    PEFT takes the keys for regular expressions; here they are names, which they are in practice,
    so that none of them runs for long.
    """
    for key, value in (pattern or {}).items():
        plain = key.removeprefix("^").removesuffix("$")
        if module == plain or module.endswith(f".{plain}"):
            return value
    return default
