"""Registry of engine families: finds the one that an engine directory belongs to."""

from __future__ import annotations

from pathlib import Path

from cog_triton.engines.base import EngineFamily
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.errors import EngineCorrupt, ModelUnavailable
from cog_triton.removed import removed

FAMILIES: tuple[type[EngineFamily], ...] = (
    OpenVINOFamily,
    TensorRTLLMFamily,
    VLLMFamily,
    MockFamily,
)


def open_engine(directory: Path) -> EngineFamily:
    """Open `directory` with the first family that matches it; raises E1304 or E1306."""
    if not directory.is_dir():
        raise ModelUnavailable(
            f"ENGINE_DIR={str(directory)!r}: no such directory; build an engine with"
            " `cog-triton build`, then serve its engine.tar"
        )
    if (directory / "llmapi.yaml").exists():
        raise removed("llmapi.yaml")
    for family in FAMILIES:
        if family.matches(directory):
            return family.open(directory)
    held = sorted(path.name for path in directory.iterdir())
    names = ", ".join(family.name for family in FAMILIES)
    raise EngineCorrupt(
        f"{directory}: not an engine directory of any family ({names});"
        f" it holds {', '.join(held[:10]) or 'nothing'}"
    )
