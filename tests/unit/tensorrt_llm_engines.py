"""Small TensorRT-LLM engine directories with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sample_engines
import small_tokenizers

from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.triton import model_repository
from cog_triton.triton.serve_config import MODELS, ServeConfig

_PLUGINS = {
    "gpt_attention_plugin": "auto",
    "remove_input_padding": True,
    "context_fmha": True,
    "use_paged_context_fmha": True,
    "tokens_per_block": 32,
    "lora_plugin": None,
}
V1 = {
    **sample_engines.V1,
    "pretrained_config": {
        **sample_engines.V1["pretrained_config"],
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1, "cp_size": 1},
    },
    "build_config": {
        **sample_engines.V1["build_config"],
        "speculative_decoding_mode": 1,
        "weight_streaming": False,
        "plugin_config": _PLUGINS,
    },
}
V0_9 = sample_engines.changed(
    sample_engines.changed(sample_engines.V0_9, "build_config.max_batch_size", 64),
    "pretrained_config.mapping",
    {"world_size": 1, "tp_size": 1, "pp_size": 1},
)
OLD_TEMPLATE = Path(__file__).parents[1] / "tensorrt_llm_tree" / "template-0.9.pbtxt"
END = 1  # <|im_end|> of the tokenizer
INFO = {"encoded_vocab": ["a"], "tokenizer_str": "{}", "stop_token_ids": [END]}


def make(path: Path, config: dict[str, Any] = V1, **changes: Any) -> Path:
    """An engine directory; `changes` are values by the key's path, with `__` for the dots."""
    for where, value in changes.items():
        config = sample_engines.changed(config, where.replace("__", "."), value)
    ranks = config["pretrained_config"]["mapping"]["world_size"]
    sample_engines.directory(path, config, ranks)
    small_tokenizers.save(path, small_tokenizers.byte_level(), eos_token="<|im_end|>")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, END]}))
    (path / "xgrammar_tokenizer_info.json").write_text(json.dumps(INFO))
    return path


def family(path: Path, config: dict[str, Any] = V1, **changes: Any) -> TensorRTLLMFamily:
    return TensorRTLLMFamily.open(make(path, config, **changes))


def render(
    opened: TensorRTLLMFamily, target: Path, arguments: dict[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Every model's config, written by our code and read back by Triton's own protobuf."""
    model_repository.render_repository(opened, ServeConfig(arguments or {}), target)
    return {
        model: model_repository.read_config(target / model / "config.pbtxt") for model in MODELS
    }


def parameters(config: Any) -> dict[str, str]:
    return {name: item.string_value for name, item in config.parameters.items()}
