"""LoRA adapters of a build: fetched and recorded, checked before any step, and converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import ID, ask_hub, serving_hub
from lora_adapters import adapter

from cog_triton.artifact.lora_adapter import CONVERTED_FILES, read_adapter
from cog_triton.builder import packed_adapters
from cog_triton.builder.config import BuildConfig, parse_config
from cog_triton.engines.tensorrt_llm.adapter_tensors import to_tensors
from cog_triton.errors import (
    BuildConfigInvalid,
    CogTritonError,
    EngineIncompatible,
    ModelUnavailable,
)

ARGS = "lora_plugin: auto, lora_target_modules: [attn_q], max_lora_rank: 4"


def config(adapters: Any, args: str = ARGS, **changes: Any) -> BuildConfig:
    value = {
        "model_id": "org/base",
        "example_name": "llama",
        "convert": {"script": "convert_checkpoint.py", "output_dir": "checkpoint"},
        "lora_adapters": adapters,
        **changes,
    }
    build = f'"build": {{executable: trtllm-build, output_dir: engine, args: {{{args}}}}}'
    return parse_config(f"{json.dumps(value)[:-1]}, {build}}}", "c.yaml")


def prepared(
    wanted: BuildConfig, directory: Path, **shape: int
) -> tuple[list[packed_adapters.PackedAdapter], list[str]]:
    model, said = directory / "model", []
    model.mkdir(exist_ok=True)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, **shape}
    (model / "config.json").write_text(json.dumps(sizes))
    return packed_adapters.fetch(wanted, model, directory / "store", said.append), said


def test_an_adapter_of_the_hub_is_recorded_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = adapter(tmp_path / "a")
    with serving_hub({path.name: path.read_bytes() for path in source.iterdir()}) as hub:
        ask_hub(monkeypatch, hub.url, tmp_path)
        ((packed,), said) = prepared(config({"sql": ID}), tmp_path)
    assert packed.entry.source == ID
    assert packed.entry.revision is not None
    assert len(packed.entry.revision) == 40
    assert said[-1] == f"[lora] sql: rank 4 of q_proj, {packed.entry.revision}"


def test_it_is_packed_as_saved_and_as_tensorrt_llm_takes_it(tmp_path: Path) -> None:
    source = adapter(tmp_path / "a", 2, layers=2)
    ((packed,), _) = prepared(config({"sql": str(source)}), tmp_path)
    packed.write(tmp_path / "engine")
    place = tmp_path / "engine" / "lora" / "sql"
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert sorted(path.name for path in place.iterdir()) == sorted((*names, *CONVERTED_FILES))
    expected = to_tensors(read_adapter(source))
    for name, tensor in zip(CONVERTED_FILES, ("lora_weights", "lora_config"), strict=True):
        found = np.load(place / name)
        assert found.dtype == expected[tensor].dtype
        assert np.array_equal(found, expected[tensor])


@pytest.mark.parametrize(
    ("made", "shape", "says"),
    [
        ({"rank": 8}, {}, "rank 8; the engine takes at most 4"),
        ({"modules": ["mlp.up_proj"]}, {}, "the engine takes adapters of q_proj only"),
        ({}, {"hidden_size": 32}, "takes 16 values; the base model's hidden size is 32"),
        ({"layers": 2}, {"num_hidden_layers": 1}, "the base model has 1 layers"),
        ({"use_dora": True}, {}, "use_dora=True: not supported"),
    ],
)
def test_one_that_does_not_fit_is_refused_by_name(
    made: dict[str, Any], shape: dict[str, int], says: str, tmp_path: Path
) -> None:
    source = adapter(tmp_path / "a", **made)
    with pytest.raises(EngineIncompatible) as caught:
        prepared(config({"sql": str(source)}), tmp_path, **shape)
    assert caught.value.detail.startswith("lora_adapters.sql: ")
    assert says in caught.value.detail


def test_a_source_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"lora_adapters\.sql: './none': no such directory"):
        prepared(config({"sql": "./none"}), tmp_path)


def test_another_dtype_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    step = {"script": "c.py", "output_dir": "checkpoint", "args": {"dtype": "bfloat16"}}
    with pytest.raises(EngineIncompatible, match=r"convert\.args\.dtype: 'bfloat16': must be flo"):
        prepared(config({"sql": "./none"}, convert=step), tmp_path)


@pytest.mark.parametrize(
    ("adapters", "args", "says"),
    [
        ({"sql": "a"}, "", "lora_adapters: build.args.lora_plugin must be set"),
        ({"sql": "a"}, "lora_plugin: disable", "build.args.lora_plugin must be set"),
        ({"sql": "a"}, "lora_plugin: auto", "lora_target_modules must list the modules"),
        ({"sql": "a"}, "lora_plugin: auto, lora_target_modules: [q]", "'q': adapters are of attn_"),
        ({"a/b": "a"}, ARGS, "lora_adapters.a/b"),
        ({"..": "a"}, ARGS, "lora_adapters..."),
        ({"sql": 3}, ARGS, "lora_adapters.sql: 3"),
        ({"sql": {"source": "a", "revison": "b"}}, ARGS, "did you mean 'revision'"),
        ({"sql": {"source": "a", "sha256": "b"}}, ARGS, "lora_adapters.sql.sha256: 'b'"),
    ],
)
def test_a_config_that_cannot_be_is_refused(adapters: Any, args: str, says: str) -> None:
    with pytest.raises(BuildConfigInvalid) as caught:
        config(adapters, args)
    assert says in caught.value.detail


def test_no_secret_of_a_url_is_packed() -> None:
    text = config({"sql": "https://me:pass@host/a.tar?sig=secret"}).to_yaml()
    assert "https://host/a.tar" in text
    assert "pass" not in text
    assert "secret" not in text


def test_a_look_checks_what_is_here(tmp_path: Path) -> None:
    here = adapter(tmp_path / "a")
    wanted = config({"sql": str(here), "far": "org/far"})
    assert list(packed_adapters.look(wanted, None)) == [
        "sql: rank 4 of q_proj",
        "far: org/far: checked when it is fetched",
    ]
    adapter(tmp_path / "a", 16)
    with pytest.raises(CogTritonError, match=r"lora_adapters\.sql: .* rank 16"):
        list(packed_adapters.look(wanted, None))
