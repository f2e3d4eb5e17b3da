"""Notes on a model, before its first step: what a convert script is known to fail with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from cog_triton.artifact.safetensors_file import read_header
from cog_triton.builder.plan import Plan
from cog_triton.errors import EngineCorrupt

_LM_HEAD = "lm_head.weight"
_INDEX = "model.safetensors.index.json"
# Scripts that read the output layer's weights by name.
_READS_LM_HEAD = ("llama",)
# gpt's scripts take the variant from the directory's name, and fail without it.
_VARIANTS = {"gpt2": "gpt2", "gpt_bigcode": "starcoder", "starcoder2": "starcoder2"}


def notes(plan: Plan, model: Path) -> Iterator[str]:
    """What to know of `model`, a directory, before the convert step of `plan` runs."""
    first = plan.steps[0]
    family = PurePosixPath(first.script.name).parent.name
    config = json_object(model / "config.json")
    if family in _READS_LM_HEAD and config.get("tie_word_embeddings") and not _has_lm_head(model):
        yield (
            f"[{first.name}] warning: the model ties its embeddings and has no {_LM_HEAD}, for"
            " which TensorRT-LLM before 0.16 fails with \"'NoneType' object has no attribute"
            " 'to'\": if it does, add a copy of the embeddings under that name to the model"
        )
    variant = _VARIANTS.get(str(config.get("model_type")))
    if family == "gpt" and variant is not None and "gpt_variant" not in first.args:
        known = any(name in plan.config.model_id for name in (variant, "santacoder"))
        if not known:
            yield (
                f"[{first.name}] warning: gpt_variant is not given and the model's id does not"
                f" name it, for which {PurePosixPath(first.script.name).name} fails: its"
                f" config.json says {config['model_type']}, so {variant}"
            )


def _has_lm_head(model: Path) -> bool:
    """Whether the weights have an output layer of their own; true where that cannot be told."""
    if (model / _INDEX).is_file():
        return _LM_HEAD in json_object(model / _INDEX).get("weight_map", {})
    files = list(model.glob("*.safetensors"))
    try:
        return not files or any(_LM_HEAD in read_header(file) for file in files)
    except EngineCorrupt:  # the script says what is wrong with it
        return True


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
