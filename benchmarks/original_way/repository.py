"""Our rendered model repository, changed into the original cog-triton's shape.

Its ensemble sends token ids through `postprocessing`, which adds four tensors to each response.
One instance of `preprocessing` and of `postprocessing`: with the 64 that it shipped, tokens come
out of order, and at a third of the rate.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from cog_triton.triton.model_repository import read_config

_INPUTS = {"min_tokens": "min_length", "seed": "random_seed"}
_OUTPUTS = {
    "output_ids": ("OUTPUT", "TYPE_INT32", "[-1]"),
    "cum_log_probs": ("OUT_CUM_LOG_PROBS", "TYPE_FP32", "[-1]"),
    "output_log_probs": ("OUT_OUTPUT_LOG_PROBS", "TYPE_FP32", "[-1, -1]"),
    "context_logits": ("OUT_CONTEXT_LOGITS", "TYPE_FP32", "[-1, -1]"),
    "generation_logits": ("OUT_GENERATION_LOGITS", "TYPE_FP32", "[-1, -1, -1]"),
}
_ENGINE_OUTPUTS = ("output_ids", "sequence_length")


def reshape(repository: Path) -> None:
    """Change `ensemble` and `postprocessing` in place."""
    _replace_ensemble(repository / "ensemble")
    _change(repository / "postprocessing", _postprocessing)
    code = Path(__file__).with_name("postprocessing.py")
    shutil.copy(code, repository / "postprocessing" / "1" / "model.py")


def _change(model: Path, change: Any) -> None:
    config = read_config(model / "config.pbtxt")
    change(config)
    (model / "config.pbtxt").write_text(text_format.MessageToString(config), "utf-8")


def _replace_ensemble(model: Path) -> None:
    """Put an ensemble of three models in the place of ours, which is one model."""
    batch_size = read_config(model / "config.pbtxt").max_batch_size
    shutil.copy(Path(__file__).with_name("ensemble.pbtxt"), model / "config.pbtxt")
    (model / "1" / "model.py").unlink()

    def change(config: Any) -> None:
        config.max_batch_size = batch_size
        _ensemble(config)

    _change(model, change)


def _ensemble(config: Any) -> None:
    for item in config.input:
        item.name = _INPUTS.get(item.name, item.name)
    _replace_outputs(config, {name: kind for name, (_, *kind) in _OUTPUTS.items()})
    for step in config.ensemble_scheduling.step:
        for name, value in dict(step.input_map).items():
            step.input_map[name] = _INPUTS.get(value, value)
        if step.model_name == "tensorrt_llm":
            for name in set(step.output_map) - set(_ENGINE_OUTPUTS):
                del step.output_map[name]
        elif step.model_name == "postprocessing":
            step.output_map.clear()
            for name, (own, *_) in _OUTPUTS.items():
                step.output_map[own] = name


def _postprocessing(config: Any) -> None:
    _replace_outputs(config, {own: kind for own, *kind in _OUTPUTS.values()})


def _replace_outputs(config: Any, outputs: dict[str, list[str]]) -> None:
    config.ClearField("output")
    for name, (kind, dims) in outputs.items():
        text_format.Merge(f'output {{ name: "{name}" data_type: {kind} dims: {dims} }}', config)
