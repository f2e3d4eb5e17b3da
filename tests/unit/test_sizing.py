"""Memory sums: shapes of real models, GPUs by name, and what is chosen for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import BuildConfigInvalid, EngineIncompatible, InvalidArgument
from cog_triton.sizing import fit, gpu_table, model_files
from cog_triton.sizing.memory_sum import AS_STORED, FP8, GIB, INT4_AWQ, INT8, memory_sum, read_shape
from cog_triton.sizing.model_files import ModelFiles
from cog_triton.sources.source import Source

# The public config.json of each, as far as memory depends on it.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
MIXTRAL = {
    **LLAMA_8B,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16,
    "n_positions": 1024,
    "vocab_size": 50257,
}
DEEPSEEK = {
    **LLAMA_8B,
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"},
}


def files_of(config: dict[str, Any], weights: int = 0) -> ModelFiles:
    shape = read_shape(config, "test")
    return ModelFiles("org/model", shape, weights or shape.parameters * shape.dtype_bytes)


def chosen(config: dict[str, Any], wanted: str) -> fit.Fit:
    files = files_of(config)
    gpu, count = gpu_table.find(wanted)
    counts = gpu_table.COUNTS if count is None else [count]
    return fit.choose(files, gpu, counts, fit.precisions_of(files, gpu))


@pytest.mark.parametrize(
    ("config", "billions", "kv_bytes"),
    [
        (LLAMA_8B, 8.03, 131072),
        (LLAMA_70B, 70.55, 327680),
        (MIXTRAL, 46.7, 131072),
        (DEEPSEEK, None, 61 * 576 * 2),
    ],
)
def test_shapes_of_public_models(
    config: dict[str, Any], billions: float | None, kv_bytes: int
) -> None:
    shape = read_shape(config, "test")
    if billions is not None:
        assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert shape.kv_bytes_per_token(1, 2) == kv_bytes


def test_names_of_older_architectures() -> None:
    shape = read_shape(GPT2, "test")
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.max_len) == (24, 1024, 16, 1024)
    assert read_shape({**GPT2, "multi_query": True}, "test").kv_heads == 1


def test_a_vision_model_is_measured_by_its_text_part() -> None:
    shape = read_shape({"architectures": ["X"], "text_config": LLAMA_8B, "hidden_size": 1}, "test")
    assert shape.hidden == 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            ({"hidden_size": value}, r"hidden_size: .*positive whole")
            for value in (0, -1, "1", 1.5)
        ),
        ({"hidden_size": True}, r"hidden_size: True: must be a positive whole number"),
        ({"vocab_size": None}, r"test: vocab_size: missing"),
    ],
)
def test_a_size_that_is_none_is_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(BuildConfigInvalid, match=rf"E1300.*{said}"):
        read_shape({**LLAMA_8B, **change}, "test")


@pytest.mark.parametrize(
    ("wanted", "name", "count"),
    [
        ("l40s", "L40S", None),
        ("H100", "H100 80GB", None),
        ("8xh100", "H100 80GB", 8),
        ("4 x A100-40GB", "A100 40GB", 4),
        ("rtx 4090", "RTX 4090", None),
        ("2x4090", "RTX 4090", 2),
    ],
)
def test_gpus_by_name(wanted: str, name: str, count: int | None) -> None:
    gpu, found = gpu_table.find(wanted)
    assert (gpu.name, found) == (name, count)


@pytest.mark.parametrize("wanted", ["h1000", "", "0xh100", "x", "t4", "l40s; rm"])
def test_an_unknown_gpu_is_refused_with_the_list(wanted: str) -> None:
    with pytest.raises(InvalidArgument, match=r"E1005.*--gpu .*must be one of a10, "):
        gpu_table.find(wanted)


@pytest.mark.parametrize(
    ("config", "wanted", "gpus", "precision"),
    [
        (LLAMA_8B, "l40s", 1, AS_STORED),
        (LLAMA_8B, "l4", 1, FP8),  # 16 bits leave room for 7 sequences
        (LLAMA_8B, "a10g", 1, INT8),  # sm_86 has no FP8
        (LLAMA_8B, "4xl4", 4, AS_STORED),
        (LLAMA_70B, "h100", 2, FP8),
        (LLAMA_70B, "4xh100", 4, AS_STORED),
        (LLAMA_70B, "h200", 1, FP8),
        (LLAMA_70B, "1xa100", 1, INT4_AWQ),  # the only way on one
        (LLAMA_70B, "8xa100", 8, AS_STORED),
    ],
)
def test_the_choice(config: dict[str, Any], wanted: str, gpus: int, precision: object) -> None:
    found = chosen(config, wanted)
    assert (found.memory.gpus, found.memory.precision) == (gpus, precision)
    assert found.memory.kv_tokens >= 2 * found.max_seq_len
    assert found.max_input_len < found.max_seq_len <= config["max_position_embeddings"]


def test_the_sum_adds_up() -> None:
    gpu, _ = gpu_table.find("l40s")
    one = memory_sum(read_shape(LLAMA_8B, "test"), 16_060_522_496, gpu, 1, AS_STORED)
    assert one.weights / GIB == pytest.approx(14.96, abs=0.01)  # what vLLM logs of this model
    assert one.usable == one.weights + one.activations + one.runtime + one.kv_cache
    assert one.kv_tokens == one.kv_cache // 131072
    assert len(one.lines()) == 5


def test_tensor_parallelism_divides_weights_and_heads() -> None:
    gpu, _ = gpu_table.find("h100")
    shape = read_shape(LLAMA_70B, "test")
    one, eight, sixteen = (memory_sum(shape, 10**11, gpu, n, AS_STORED) for n in (1, 8, 16))
    assert eight.weights == one.weights // 8
    assert eight.kv_per_token == one.kv_per_token // 8
    assert sixteen.kv_per_token == eight.kv_per_token  # 8 heads: a GPU holds one at least


def test_embeddings_are_not_quantized() -> None:
    gpu, _ = gpu_table.find("h100")
    shape = read_shape(LLAMA_8B, "test")
    stored = shape.parameters * 2
    outside = 2 * shape.vocabulary * shape.hidden * 2
    assert memory_sum(shape, stored, gpu, 1, FP8).weights == (stored - outside) // 2 + outside


def test_quantized_weights_are_taken_as_they_are() -> None:
    files = files_of(DEEPSEEK, 700 * 10**9)
    gpu, _ = gpu_table.find("h200")
    assert fit.precisions_of(files, gpu) == [AS_STORED]
    assert fit.choose(files, gpu, [8], [AS_STORED]).memory.weights == -(-700 * 10**9 // 8)


def test_what_does_not_fit_says_what_is_short_and_what_would_do() -> None:
    with pytest.raises(EngineIncompatible) as caught:
        chosen(LLAMA_70B, "1xl4")
    said = str(caught.value)
    assert "E1305" in said
    assert "GiB short on each" in said
    assert "weights" in said
    assert "It would fit 1 x " in said


def test_heads_that_cannot_be_split_are_named() -> None:
    with pytest.raises(EngineIncompatible, match="32 attention heads cannot be split over 3 GPUs"):
        chosen(LLAMA_8B, "3xh100")


def test_a_directory_without_weights_is_summed_by_its_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    found = model_files.describe(Source.open(str(tmp_path)))
    assert (found.name, found.weight_bytes) == (str(tmp_path), found.shape.parameters * 2)
    (tmp_path / "a.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 70)
    assert model_files.describe(Source.open(str(tmp_path))).weight_bytes == 1000


@pytest.mark.parametrize(
    ("quantization", "kv"),
    [({"kv_cache_quant_algo": "FP8"}, 1), ({"quant_algo": "FP8"}, 2), (None, 2), (5, 2), ([], 2)],
)
def test_an_engine_says_how_wide_its_kv_cache_is(quantization: object, kv: int) -> None:
    config = {"pretrained_config": {**LLAMA_8B, "quantization": quantization}}
    text, sizes = json.dumps(config).encode(), {"rank0.engine": 1000}
    files, precision = model_files.of_engine("it", text, sizes, 4096)
    assert (precision.kv, files.weight_bytes, files.shape.max_len) == (kv, 1000, 4096)
