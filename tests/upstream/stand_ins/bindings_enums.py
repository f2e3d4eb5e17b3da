"""Enumerations of TensorRT-LLM's compiled bindings whose values get into an engine's config."""

from __future__ import annotations

import enum


class KVCacheType(enum.Enum):
    """``tensorrt_llm::runtime::ModelConfig::KVCacheType``."""

    CONTINUOUS = 0
    PAGED = 1
    DISABLED = 2

    @classmethod
    def from_string(cls, text: str) -> KVCacheType:
        """The type that `text` names in any case."""
        return cls[text.upper()]
