"""Engine directories that tests/gpu makes for a real GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from openvino_reference import TinyModel
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from cog_triton.build_scripts.openvino import _from_hf, _gguf_file
from cog_triton.engines.vllm.model_directory import read_model


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "gpu"))
    import models

    yield models
    del sys.modules["models"]


@pytest.fixture
def written(models: ModuleType, tmp_path: Path) -> tuple[TinyModel, Path]:
    """A tiny model, and what came of it through a GGUF."""
    tiny = TinyModel.make("LlamaForCausalLM")
    found = _from_hf.read(tiny.save(tmp_path / "hf"))
    tensors = [(each, "F32" if len(each.shape) == 1 else "F16") for each in found.tensors]
    _gguf_file.write(tmp_path / "m.gguf", found.model.gguf_architecture, found.fields, tensors)
    models.from_gguf(tmp_path / "m.gguf", tmp_path / "made")
    return tiny, tmp_path / "made"


def test_gguf_weights_survive_conversion(written: tuple[TinyModel, Path]) -> None:
    tiny, made = written
    tensors = load_file(made / "model.safetensors")
    assert tensors.keys() == tiny.weights.keys()
    for name, values in tiny.weights.items():
        assert np.array_equal(tensors[name], values.astype(np.float16)), name
    config = json.loads((made / "config.json").read_text())
    for key in ("hidden_size", "num_key_value_heads", "rope_theta", "rms_norm_eps"):
        assert config[key] == tiny.config[key]


def test_the_large_model_can_decode_every_token(
    models: ModuleType, written: tuple[TinyModel, Path], tmp_path: Path
) -> None:
    _, small = written
    large = models.large(tmp_path / "large", small, {"max_model_len": 64})
    old, new = (Tokenizer.from_file(str(d / "tokenizer.json")) for d in (small, large))
    assert new.get_vocab_size() == models.SHAPE["vocab_size"]
    assert new.decode([models.SHAPE["vocab_size"] - 1]) == " w128255"
    assert new.encode("hello w60000").ids == old.encode("hello w60000").ids
    model = read_model(large)
    assert model.arguments["load_format"] == "dummy"
    assert model.max_model_len == 64


def test_weights_of_zeros_are_a_sparse_file_of_the_shape(
    models: ModuleType, tmp_path: Path
) -> None:
    shape = {**models.SHAPE, "num_hidden_layers": 2, "vocab_size": 100, "hidden_size": 64}
    models.zeros(tmp_path, {**shape, "intermediate_size": 96, "head_dim": 16})
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert len(shapes) == 3 + 2 * 9
    assert shapes["lm_head.weight"] == (100, 64)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (8 * 16, 64)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (64, 96)
    told = (tmp_path / "model.safetensors").stat()
    assert told.st_blocks * 512 < told.st_size
