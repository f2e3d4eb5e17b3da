"""Tensors that `make test-upstream` expects of a checkpoint, and what it says of others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from upstream.checkpoint_comparison import compared, differences
from upstream.checkpoint_tensors import Tensors, expected
from upstream.layer_names import NAMES

CONFIG = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
VOCABULARY, HIDDEN, INNER, HEAD = 5, 8, 6, 2


@pytest.fixture
def llama() -> Tensors:
    shapes = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCABULARY, HIDDEN),
    }
    of_layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (4 * HEAD, HIDDEN),
        "self_attn.k_proj": (2 * HEAD, HIDDEN),
        "self_attn.v_proj": (2 * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 4 * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    shapes |= {f"model.layers.0.{name}": shape for name, shape in of_layer.items()}
    random = np.random.default_rng(0)
    return {
        f"{name}.weight": random.integers(1, 1000, shape).astype(np.float16)
        for name, shape in shapes.items()
    }


@pytest.fixture
def checkpoint(llama: Tensors, tmp_path: Path):
    """A model, and a checkpoint of two ranks, as `differences` reads them."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(llama, tmp_path / "model.safetensors")
    for rank in range(2):
        ours = expected(NAMES["llama"], llama, CONFIG, rank, 2)
        save_file(
            {name: np.ascontiguousarray(tensor) for name, tensor in ours.items()},
            tmp_path / f"rank{rank}.safetensors",
        )
    return tmp_path


def test_ranks_have_their_heads_and_their_part_of_the_mlp(llama: Tensors) -> None:
    second = expected(NAMES["llama"], llama, CONFIG, 1, 2)
    qkv = second["transformer.layers.0.attention.qkv.weight"]
    layer = {name.removeprefix("model.layers.0."): t for name, t in llama.items()}
    assert np.array_equal(qkv[:4], layer["self_attn.q_proj.weight"][4:])
    assert np.array_equal(qkv[4:6], layer["self_attn.k_proj.weight"][2:])
    assert np.array_equal(qkv[6:], layer["self_attn.v_proj.weight"][2:])
    fc = second["transformer.layers.0.mlp.fc.weight"]
    assert np.array_equal(fc, layer["mlp.gate_proj.weight"][3:])
    proj = second["transformer.layers.0.mlp.proj.weight"]
    assert np.array_equal(proj, layer["mlp.down_proj.weight"][:, 3:])
    head = second["lm_head.weight"]
    assert np.array_equal(head[:2], llama["lm_head.weight"][3:])
    assert not head[2].any()


def test_shared_heads_are_on_each_rank(llama: Tensors) -> None:
    config = {**CONFIG, "num_key_value_heads": 1}
    for kind in ("k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{kind}.weight"
        llama[name] = llama[name][:HEAD]
    ranks = [expected(NAMES["llama"], llama, config, rank, 2) for rank in range(2)]
    first, second = (rank["transformer.layers.0.attention.qkv.weight"] for rank in ranks)
    assert not np.array_equal(first[:4], second[:4])
    assert np.array_equal(first[4:], second[4:])


def test_a_checkpoint_is_equal_until_a_rank_is_missing(checkpoint: Path) -> None:
    assert differences(NAMES["llama"], checkpoint, checkpoint, 2) == []
    (checkpoint / "rank1.safetensors").unlink()
    (line,) = differences(NAMES["llama"], checkpoint, checkpoint, 2)
    assert line == "ranks ['rank0.safetensors'], not ['rank0.safetensors', 'rank1.safetensors']"


def test_each_tensor_that_is_not_equal_is_named(llama: Tensors) -> None:
    ours = expected(NAMES["llama"], llama, CONFIG, 0, 1)
    fc, gate = (f"transformer.layers.0.mlp.{name}.weight" for name in ("fc", "gate"))
    theirs = {**ours, fc: ours[gate], gate: ours[fc], "more": ours[fc]}
    theirs["lm_head.weight"] = ours["lm_head.weight"][1:]
    del theirs["transformer.ln_f.weight"]
    lines = [*compared(theirs, ours)]
    assert [line.split(":")[0] for line in lines] == [
        *("lm_head.weight", "more is not of the model", "transformer.layers.0.mlp.fc.weight"),
        *("transformer.layers.0.mlp.gate.weight", "transformer.ln_f.weight is missing"),
    ]
