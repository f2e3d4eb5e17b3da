"""Fake TensorRT-LLM: its checkpoints are real."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tensorrt_llm_tree import COMMANDS, Installation, install, models


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(tmp_path_factory.mktemp("tree"))


def run(tree: Installation, cwd: Path, script: str, *words: str) -> str:
    path = tree.path_of(script)
    command = [str(path)] if script in COMMANDS else [str(tree.python), str(path)]
    done = subprocess.run([*command, *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_llama_shards_add_up_to_its_weights(tree: Installation, tmp_path: Path) -> None:
    model = load_file(models.llama(tmp_path / "model") / "model.safetensors")
    script = "models/core/llama/convert_checkpoint.py"
    words = ["--model_dir", "model", "--output_dir", "out", "--dtype", "float32"]
    run(tree, tmp_path, script, *words, "--tp_size", "2", "--pp_size", "2")
    ranks = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(4)]
    # Ranks 0 and 1 have the first layer, 2 and 3 the second one.
    for layer, (left, right) in enumerate([ranks[:2], ranks[2:]]):
        ours, theirs = "transformer.layers.0.", f"model.layers.{layer}."
        halves = [np.split(rank[f"{ours}attention.qkv.weight"], [8, 12]) for rank in (left, right)]
        for place, name in enumerate("qkv"):
            whole = np.concatenate([half[place] for half in halves])
            assert np.array_equal(whole, model[f"{theirs}self_attn.{name}_proj.weight"])
        dense = f"{ours}attention.dense.weight"
        whole = np.concatenate([left[dense], right[dense]], axis=1)
        assert np.array_equal(whole, model[f"{theirs}self_attn.o_proj.weight"])
    head = np.concatenate([rank["lm_head.weight"] for rank in ranks[2:]])
    vocabulary = len(model["lm_head.weight"])
    assert np.array_equal(head[:vocabulary], model["lm_head.weight"])
    assert len(head) == vocabulary + 1
    assert not head[vocabulary:].any()
    assert "transformer.vocab_embedding.weight" in ranks[1]
    assert "transformer.ln_f.weight" not in ranks[1]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["mapping"]["world_size"], config["dtype"]) == (4, "float32")


def test_gpt2_shards_add_up_to_its_weights(tree: Installation, tmp_path: Path) -> None:
    model = load_file(models.gpt2(tmp_path / "model") / "model.safetensors")
    script = "models/core/gpt/convert_checkpoint.py"
    words = ["--model_dir", "model", "--output_dir", "out", "--dtype", "float16", "--tp_size", "2"]
    run(tree, tmp_path, script, *words)
    ranks = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(2)]
    halves = [np.split(rank["transformer.layers.1.attention.qkv.weight"], 3) for rank in ranks]
    whole = np.concatenate([half[place] for place in range(3) for half in halves])
    assert np.array_equal(whole.T, model["h.1.attn.c_attn.weight"].astype(np.float16))
    proj = np.concatenate([rank["transformer.layers.1.mlp.proj.weight"] for rank in ranks], axis=1)
    assert np.array_equal(proj.T, model["h.1.mlp.c_proj.weight"].astype(np.float16))


def test_quantized_weights_are_close_to_the_originals(tree: Installation, tmp_path: Path) -> None:
    model = load_file(models.llama(tmp_path / "model") / "model.safetensors")
    words = ["--model_dir", "model", "--output_dir", "out", "--qformat", "int8_wo"]
    run(tree, tmp_path, "quantization/quantize.py", *words, "--dtype", "float32")
    found = load_file(tmp_path / "out" / "rank0.safetensors")
    name = "transformer.layers.0.mlp.fc.weight"
    scale = found[name.replace(".weight", ".weights_scaling_factor")]
    assert found[name].dtype == np.int8
    wanted = model["model.layers.0.mlp.gate_proj.weight"]
    assert np.abs(found[name] * scale - wanted).max() <= scale * 0.51


def test_engines_are_reproducible(tree: Installation, tmp_path: Path) -> None:
    models.llama(tmp_path / "model")
    script = "models/core/llama/convert_checkpoint.py"
    run(tree, tmp_path, script, "--model_dir", "model", "--output_dir", "checkpoint")
    for out in ("one", "two"):
        said = run(
            tree, tmp_path, "trtllm-build", "--checkpoint_dir", "checkpoint", "--output_dir", out
        )
        assert "version: 1.2.1" in said
    for name in ("config.json", "rank0.engine"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
