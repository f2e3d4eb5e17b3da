"""Memory sums and ``cog-triton init``: shapes of real models, and what is chosen for GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import ran

from cog_triton.builder.config import SealedConfig, load_any, load_config
from cog_triton.engines.vllm.model_directory import read_arguments
from cog_triton.errors import BuildConfigInvalid, EngineIncompatible
from cog_triton.sizing import fit, gpu_table, model_files
from cog_triton.sizing.gpu_table import Gpu
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


def test_what_does_not_fit_says_what_is_short_and_what_would_do() -> None:
    with pytest.raises(EngineIncompatible) as caught:
        chosen(LLAMA_70B, "1xl4")
    said = str(caught.value)
    assert "E1305" in said
    assert "GiB short on each" in said
    assert "weights" in said
    assert "It would fit 1 x " in said


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


GEMMA = {**LLAMA_8B, "architectures": ["Gemma2ForCausalLM"], "max_position_embeddings": 8192}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRTLLM_DIR", raising=False)


def model(config: dict[str, Any]) -> str:
    directory = Path("m")
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def run(*arguments: str) -> tuple[int, str]:
    result = ran("init", *arguments, columns=200)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        (LLAMA_8B, ["--gpu", "l40s"]),
        (LLAMA_8B, ["--gpu", "l4"]),
        (LLAMA_8B, ["--gpu", "a10g", "--quantization", "int4_awq"]),
        (LLAMA_70B, ["--gpu", "8xh100"]),
        (MIXTRAL, ["--gpu", "2xa100"]),
        (GEMMA, ["--gpu", "2xa100"]),
    ],
)
def test_the_builder_takes_every_argument(config: dict[str, Any], arguments: list[str]) -> None:
    code, said = run(model(config), *arguments, "-o", "out.yaml")
    assert code == 0, said
    assert said.count(": OK: the arguments are what") == 2
    assert "NOT CHECKED" not in said
    built = load_config(Path("out.yaml"))
    assert built.build.args["max_num_tokens"] == 8192
    gpus = built.world_size or 1
    first = built.convert or built.quantize
    assert first is not None
    assert gpus in (first.args.get("tp_size"), first.args.get("world-size"))


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        (LLAMA_8B, ["--gpu", "l40s"], {"max_model_len": 32768}),
        (LLAMA_70B, ["--gpu", "h100"], {"tensor_parallel_size": 2, "quantization": "fp8"}),
        (DEEPSEEK, ["--gpu", "8xh200"], {"tensor_parallel_size": 8}),
    ],
)
def test_vllm_takes_every_argument(
    config: dict[str, Any], arguments: list[str], expected: dict[str, object]
) -> None:
    name = model(config)
    code, said = run(name, "--for", "vllm", *arguments, "-o", "served")
    assert code == 0, said
    found = read_arguments(Path("served"))
    assert {**found, **expected} == found
    assert found["model"] == str(Path(name).resolve())
    assert "Serve it: cog-triton serve served" in said


def test_vllm_takes_a_build_config_to_seal_by() -> None:
    name = model(LLAMA_8B)
    code, said = run(name, "--gpu", "h200", "--for", "vllm", "-o", "sealed.yaml")
    assert code == 0, said
    config = load_any(Path("sealed.yaml"))
    assert isinstance(config, SealedConfig)
    assert config.model_id == str(Path(name).resolve())
    assert config.args["max_num_seqs"]
    assert "Build it on H200" in said


def test_what_is_there_is_not_overwritten() -> None:
    name = model(LLAMA_8B)
    Path("mine.yaml").write_text("mine")
    code, said = run(name, "--gpu", "l40s", "-o", "mine.yaml")
    assert (code, Path("mine.yaml").read_text()) == (1, "mine")
    assert "E1005" in said
    assert "--force" in said
    assert (
        "E1005 InvalidArgument: --output /proc/it.yaml"
        in run("m", "--gpu", "l4", "-o", "/proc/it.yaml")[1]
    )
    assert "E1304" in run("./nothing", "--gpu", "l4")[1]
    assert run(name, "--gpu", "l40s", "-o", "mine.yaml", "--force")[0] == 0
    assert Path("mine.yaml").read_text() != "mine"


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        (LLAMA_8B, ["--gpu", "h1000"], "E1005 InvalidArgument: --gpu 'h1000'"),
        (LLAMA_70B, ["--gpu", "1xl4"], "E1305 EngineIncompatible"),
        ({**LLAMA_8B, "architectures": ["NewForCausalLM"]}, ["--gpu", "h100"], "E1301"),
        (DEEPSEEK, ["--gpu", "8xb200"], "E1301"),
        ({**LLAMA_8B, "quantization_config": {"quant_method": "awq"}}, ["--gpu", "l4"], "(awq)"),
        (LLAMA_8B, ["--gpu", "l4", "--for", "vllm", "--quantization", "int8"], "does not make"),
    ],
)
def test_refusals_name_the_value(
    config: dict[str, Any], arguments: list[str], expected: str
) -> None:
    code, said = run(model(config), *arguments)
    assert code == 1
    assert expected in said
    assert sorted(Path().iterdir()) == [Path("m")]


def test_the_gpus_of_this_machine_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_table, "gpu_here", lambda: None)
    assert "this machine has no GPU: name one" in run(model(LLAMA_70B))[1]
    here = Gpu("NVIDIA H100 80GB HBM3", 90, 85_520_809_984)
    monkeypatch.setattr(gpu_table, "gpu_here", lambda: (here, 3))
    code, said = run(model(LLAMA_70B))
    assert code == 0, said
    assert "2 x NVIDIA H100 80GB HBM3 (sm_90), FP8" in said
    assert Path("m-2xh100-hbm3.yaml").is_file()


def test_a_vision_model_is_measured_by_its_text_part() -> None:
    shape = read_shape({"architectures": ["X"], "text_config": LLAMA_8B, "hidden_size": 1}, "test")
    assert shape.hidden == 4096
