"""Architectures that an installed vLLM can generate text with, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cog_triton.errors import EngineIncompatible, nearest

_REGISTRY = "vllm/model_executor/models/registry.py"
_GENERATING = (
    "_TEXT_GENERATION_MODELS",
    "_MULTIMODAL_MODELS",
    "_TRANSFORMERS_SUPPORTED_MODELS",
    "_TRANSFORMERS_BACKEND_MODELS",
)
_GONE = "_PREVIOUSLY_SUPPORTED_MODELS"


def require_architecture(config: Mapping[str, Any], site: Path, name: str) -> None:
    """Refuse a model that vLLM in the site-packages `site` cannot serve; `config` is config.json.

    vLLM also takes what its Transformers knows. Where its registry cannot be read, vLLM itself
    refuses, after the download.

    Raises:
        EngineIncompatible: names the architecture, and the nearest that there is.
    """
    tables = _tables(site / _REGISTRY)
    known = {name for table in _GENERATING for name in tables.get(table, ())}
    named = config.get("architectures")
    wanted = [str(one) for one in named] if isinstance(named, list) else []
    if not known or any(one in known for one in wanted):
        return
    shown = ", ".join(wanted) or "none"
    if gone := [one for one in wanted if one in tables.get(_GONE, ())]:
        raise EngineIncompatible(f"{name}: this vLLM no longer has {', '.join(gone)}")
    if others := [one for one in wanted if any(one in table for table in tables.values())]:
        raise EngineIncompatible(
            f"{name}: {', '.join(others)} makes no text; vLLM has it for other tasks"
        )
    kind = str(config.get("model_type") or "").replace("-", "_")
    if wanted and kind.isidentifier() and (site / "transformers" / "models" / kind).is_dir():
        return
    close = nearest(wanted[0], sorted(known)) if wanted else ""
    raise EngineIncompatible(
        f"{name}: architectures {shown}: neither vLLM's registry nor Transformers has it{close}"
    )


def _tables(path: Path) -> dict[str, Sequence[str]]:
    """Keys of the dictionaries at the top of vLLM's registry, by name; empty if it is another."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, Sequence[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = [k.value for k in node.value.keys if isinstance(k, ast.Constant)]
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = [str(key) for key in keys]
    return found
