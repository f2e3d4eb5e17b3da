"""LoRA adapters of TensorRT-LLM engines: limits, tensors, and the model that loads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorrt_llm_engines
from lora_adapters import adapter
from safetensors.numpy import load_file, save_file

from cog_triton.artifact.lora_adapter import LoRALimits, read_adapter
from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry, RegisteredAdapter
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.tensorrt_llm.adapter_tensors import to_tensors
from cog_triton.errors import EngineIncompatible
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton import model_repository
from cog_triton.triton.serve_config import ServeConfig

LORA = {
    "pretrained_config__dtype": "float16",
    "pretrained_config__hidden_size": 16,
    "pretrained_config__num_hidden_layers": 2,
    "build_config__plugin_config__lora_plugin": "float16",
    "build_config__lora_config": {
        "lora_dir": [],
        "max_lora_rank": 8,
        "lora_target_modules": ["attn_q", "mlp_4h_to_h"],
    },
}


def test_a_row_is_both_matrices_of_a_module_the_second_scaled(tmp_path: Path) -> None:
    modules = ("self_attn.v_proj", "mlp.down_proj")
    directory = adapter(tmp_path / "a", 4, modules=modules, layers=2, sizes={modules[1]: (16, 48)})
    tensors = to_tensors(read_adapter(directory))
    weights, config = tensors["lora_weights"], tensors["lora_config"]
    longest = 4 * 48 + 16 * 4
    assert (weights.dtype, weights.shape) == (np.float16, (1, 4, longest))
    assert (config.dtype, config.shape) == (np.int32, (1, 4, 3))
    rows = {(module, layer): place for place, (module, layer, _) in enumerate(config[0].tolist())}
    assert set(rows) == {(3, 0), (3, 1), (6, 0), (6, 1)}, "attn_v and mlp_4h_to_h"
    assert {row[2] for row in config[0].tolist()} == {4}
    stored = load_file(directory / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_"
    row = weights[0, rows[3, 1]]
    assert np.array_equal(row[:64], stored[f"{name}A.weight"].ravel().astype(np.float16))
    up = 2 * stored[f"{name}B.weight"].ravel()  # alpha 8 over rank 4
    assert np.array_equal(row[64:128], up.astype(np.float16))
    assert not row[128:].any()


def test_what_tensorrt_llm_cannot_take_is_refused(tmp_path: Path) -> None:
    unknown = read_adapter(adapter(tmp_path / "a", modules=["mlp.odd_proj"]))
    with pytest.raises(EngineIncompatible, match="odd_proj: TensorRT-LLM adapts"):
        to_tensors(unknown)
    directory = adapter(tmp_path / "b")
    path = directory / "adapter_model.safetensors"
    save_file({name: tensor * 1e6 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(EngineIncompatible, match="values that FP16 does not hold"):
        to_tensors(read_adapter(directory))


def test_limits_are_those_that_the_engine_was_built_for(tmp_path: Path) -> None:
    family = tensorrt_llm_engines.family(tmp_path / "engine", **LORA)
    assert family.lora_limits() == LoRALimits(
        max_rank=8,
        max_loras=family.limits.max_batch_size,
        modules=frozenset({"q_proj", "down_proj"}),
        hidden_size=16,
        layers=2,
    )
    plain = tensorrt_llm_engines.family(tmp_path / "plain")
    with pytest.raises(EngineIncompatible, match="build it with lora_plugin"):
        plain.lora_limits()
    other = {**LORA, "pretrained_config__dtype": "bfloat16"}
    with pytest.raises(EngineIncompatible, match=r"dtype=bfloat16: .*build with dtype float16"):
        tensorrt_llm_engines.family(tmp_path / "bf16", **other).lora_limits()


def test_requests_carry_the_task_and_never_the_name(tmp_path: Path) -> None:
    family = tensorrt_llm_engines.family(tmp_path / "engine", **LORA)
    family.registry = AdapterRegistry(tmp_path / "registry.json")
    family.registry.write([RegisteredAdapter("sql", 7, tmp_path, 4, "sql")])
    request = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=1), adapter="sql")
    values = family.encode_request(request)
    assert values["lora_task_id"] == (1 << 32) + 7
    assert "lora_name" not in values
    target = tmp_path / "repository"
    model_repository.render_repository(family, ServeConfig(), target)
    loader = model_repository.read_config(target / "lora_loader" / "config.pbtxt")
    assert loader.parameters[REGISTRY].string_value == str(family.registry.path)
    engine = model_repository.read_config(target / "tensorrt_llm" / "config.pbtxt")
    assert REGISTRY not in engine.parameters
    assert "lora_name" not in {tensor.name for tensor in engine.input}
