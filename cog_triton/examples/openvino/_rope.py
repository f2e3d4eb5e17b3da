"""RoPE scaling: supported kinds, and their exact frequencies.

OpenVINO's GGUF reader knows no RoPE scaling: it bakes ``theta ** (-2i/d)`` into the graph as
a constant. Scalings that only divide those frequencies, whatever the position, can therefore
be honoured by replacing that constant (`_ir`): ``linear`` and ``llama3``. The rest also scale
attention or depend on the length of the sequence, and are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.errors import EngineIncompatible

Floats = npt.NDArray[np.float32]

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a model: its base, and the scaling (Hugging Face form) or None."""

    theta: float
    scaling: dict[str, Any] | None = None


def frequencies(theta: float, head_size: int) -> npt.NDArray[np.float64]:
    """Unscaled inverse frequencies, radians per position: shape [head_size / 2]."""
    exponents: npt.NDArray[np.float64] = np.arange(0, head_size, 2, dtype=np.float64) / head_size
    return np.asarray(theta**-exponents, dtype=np.float64)


def divisors(rope: Rope, head_size: int) -> Floats | None:
    """What scaling divides each inverse frequency by, [head_size / 2]; None if unscaled."""
    scaling = rope.scaling
    if scaling is None:
        return None
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return np.full(head_size // 2, factor, np.float32)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = (
        float(scaling["original_max_position_embeddings"])
        * frequencies(rope.theta, head_size)
        / (2 * math.pi)
    )
    # Llama 3.1: few turns over the original context are divided in full, many not at all.
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / (keep + (1.0 - keep) / factor), dtype=np.float32)


def parse(config: dict[str, Any], default_theta: float = 10000.0) -> Rope:
    """Read ``rope_theta`` and ``rope_scaling`` / ``rope_parameters`` of a config.json.

    Raises:
        EngineIncompatible: a scaling this family cannot honour, or parameters that are missing
            or contradict each other; names the type and factor.
    """
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        raise EngineIncompatible("rope_scaling and rope_parameters disagree in config.json")
    if not isinstance(new or old or {}, dict):
        raise EngineIncompatible(f"rope_scaling {new or old!r} must be a mapping")
    given: dict[str, Any] = dict(new or old or {})
    theta = given.pop("rope_theta", config.get("rope_theta", default_theta))
    if not isinstance(theta, int | float) or theta <= 0:
        raise EngineIncompatible(f"rope_theta {theta!r} must be a positive number")
    if config.get("rope_theta", theta) != theta:
        raise EngineIncompatible(
            f"rope_theta {config['rope_theta']!r} and rope_parameters.rope_theta {theta!r} disagree"
        )
    partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise EngineIncompatible(f"partial_rotary_factor {partial!r}: only 1.0 can be honoured")
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind == "default":
        if given:
            raise EngineIncompatible(f"rope_scaling without a type has {sorted(given)}")
        return Rope(float(theta))
    wanted = {"linear": ("factor",), "llama3": _LLAMA3}.get(kind)
    if wanted is None:
        raise EngineIncompatible(
            f"RoPE scaling {kind!r} (factor {given.get('factor')!r}) cannot be honoured by an "
            "OpenVINO engine: only 'linear' and 'llama3' can"
        )
    scaling = {"rope_type": kind, **{key: _positive(kind, key, given.get(key)) for key in wanted}}
    unknown = sorted(set(given) - set(wanted) - {"original_max_position_embeddings"})
    if unknown:
        raise EngineIncompatible(f"RoPE scaling {kind!r} has unknown parameters {unknown}")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise EngineIncompatible("RoPE scaling 'llama3': high_freq_factor <= low_freq_factor")
    return Rope(float(theta), scaling)


def _positive(kind: str, key: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise EngineIncompatible(f"RoPE scaling {kind!r}: {key} {value!r} must be a number > 0")
    return value
