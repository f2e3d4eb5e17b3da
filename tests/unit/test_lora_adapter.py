"""LoRA adapters: what is read of a directory, and what is refused by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_adapters import HIDDEN, adapter
from safetensors.numpy import load_file, save_file

from cog_triton.artifact.lora_adapter import LoRALimits, check_adapter, read_adapter
from cog_triton.artifact.safetensors_file import read_header
from cog_triton.errors import EngineCorrupt, EngineIncompatible

LIMITS = LoRALimits(
    max_rank=8, max_loras=1, modules=frozenset({"q_proj"}), hidden_size=HIDDEN, layers=2
)


def test_an_adapter_is_read_as_peft_saves_it(tmp_path: Path) -> None:
    modules = ("self_attn.q_proj", "mlp.down_proj")
    directory = adapter(
        tmp_path / "a", 4, modules=modules, layers=2, use_rslora=True, sizes={modules[1]: (16, 48)}
    )
    found = read_adapter(directory)
    assert (found.rank, found.base_model, len(found.modules)) == (4, "org/base", 4)
    by_name = {module.name: module for module in found.modules}
    down = by_name["model.layers.1.mlp.down_proj"]
    assert (down.kind, down.layer, down.rank, down.scale) == ("down_proj", 1, 4, 8 / 2)
    stored = load_file(directory / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    assert np.array_equal(down.down.floats(), stored[name])


@pytest.mark.parametrize("name", ["adapter_model.bin", "weights.pth"])
def test_pickles_are_refused_by_name(name: str, tmp_path: Path) -> None:
    directory = adapter(tmp_path / "a")
    (directory / "adapter_model.safetensors").unlink()
    (directory / name).write_bytes(pickle.dumps({}))
    with pytest.raises(EngineCorrupt, match=rf"{name}: a pickle may run code"):
        read_adapter(directory)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type=LOHA"),
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "bias=all"),
    ],
)
def test_what_is_more_than_lora_is_refused_by_name(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineIncompatible, match=words):
        read_adapter(adapter(tmp_path / "a", **config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"r": 8}, "has rank 4 and 4, adapter_config.json says 8"),
        ({"r": 0}, "r=0"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"rank_pattern": []}, None),
        ({"rank_pattern": [1]}, "rank_pattern"),
    ],
)
def test_a_config_that_is_none_is_corrupt(
    config: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    directory = adapter(tmp_path / "a", **config)
    if words is None:
        assert read_adapter(directory)
        return
    with pytest.raises(EngineCorrupt, match=words):
        read_adapter(directory)


@pytest.mark.parametrize("text", ["[]", '{"r": 4}', "[" * 100_000])
def test_a_config_that_is_no_object_is_corrupt(text: str, tmp_path: Path) -> None:
    directory = adapter(tmp_path / "a")
    (directory / "adapter_config.json").write_text(text)
    with pytest.raises(EngineCorrupt, match=r"adapter_config\.json"):
        read_adapter(directory)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-1],
        lambda raw: b"\xff" * 8 + raw[8:],
        lambda raw: raw.replace(b'"F32"', b'"F64"'),
        lambda raw: raw.replace(b"[4,16]", b"[4,15]"),
        lambda raw: b"\2\0\0\0\0\0\0\0[]",
    ],
)
def test_a_broken_safetensors_file_is_refused(change: Any, tmp_path: Path) -> None:
    path = adapter(tmp_path / "a") / "adapter_model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises((EngineCorrupt, EngineIncompatible), match=r"adapter_model\.safetensors"):
        read_adapter(path.parent)


def test_half_precision_is_read_exactly(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.25], [0.0, 3.0e-5]], np.float16)
    save_file({"a": values}, tmp_path / "f16.safetensors")
    assert np.array_equal(read_header(tmp_path / "f16.safetensors")["a"].floats(), values)
    upper = (np.array([[1.5, -2.25]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    save_file({"a": upper}, tmp_path / "bf16.safetensors")
    raw = (tmp_path / "bf16.safetensors").read_bytes().replace(b'"U16"', b'"BF16"')
    length = int.from_bytes(raw[:8], "little") + 1
    (tmp_path / "bf16.safetensors").write_bytes(length.to_bytes(8, "little") + raw[8:])
    found = read_header(tmp_path / "bf16.safetensors")["a"].floats()
    assert found.tolist() == [[1.5, -2.25]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 9}, "rank 9; the engine takes at most 8; it is of 'org/base'"),
        ({"modules": ["self_attn.k_proj"]}, "adapters of q_proj only"),
        ({"layers": 3}, "has 2 layers"),
        ({"hidden": 32}, "takes 32 values; the base model's hidden size is 16"),
    ],
)
def test_an_adapter_of_another_base_model_is_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    check_adapter(read_adapter(adapter(tmp_path / "good", layers=2, rank=8)), LIMITS)
    with pytest.raises(EngineIncompatible, match=words):
        check_adapter(read_adapter(adapter(tmp_path / "other", **options)), LIMITS)
