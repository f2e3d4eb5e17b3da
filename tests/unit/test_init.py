"""``cog-triton init``: configs that the builder and vLLM's table accept, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import ran
from test_sizing import DEEPSEEK, GPT2, LLAMA_8B, LLAMA_70B, MIXTRAL

from cog_triton.builder.config import SealedConfig, load_any, load_config
from cog_triton.engines.vllm.model_directory import read_arguments
from cog_triton.sizing import gpu_table
from cog_triton.sizing.gpu_table import Gpu

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
        (LLAMA_8B, ["--gpu", "a10g"]),
        (LLAMA_8B, ["--gpu", "a10g", "--quantization", "int4_awq"]),
        (LLAMA_70B, ["--gpu", "8xh100"]),
        (LLAMA_70B, ["--gpu", "h100"]),
        (MIXTRAL, ["--gpu", "2xa100"]),
        (GPT2, ["--gpu", "l4"]),
        (GEMMA, ["--gpu", "h100"]),
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


def test_each_choice_has_its_reason() -> None:
    code, _ = run(model(LLAMA_8B), "--gpu", "l4")
    text = Path("m-l4.yaml").read_text()
    assert code == 0
    assert "left for the KV cache" in text
    assert "qformat: fp8 # half the memory" in text
    assert "use_fp8_context_fmha" not in text  # sm_89


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


def test_a_dash_prints_the_config_alone() -> None:
    code, said = run(model(LLAMA_8B), "--gpu", "l40s", "-o", "-")
    assert code == 0
    assert said.startswith("# ")
    assert said.endswith("\n")
    assert sorted(Path().iterdir()) == [Path("m")]
    assert "build --check m-l40s.yaml\n" in said  # the name that it has without -o
    assert json.loads(run("m", "--gpu", "l40s", "--for", "vllm", "-o", "-")[1])["max_num_seqs"]


def test_what_is_printed_is_checked_as_what_is_written() -> None:
    name = model({**LLAMA_8B, "num_key_value_heads": 6})
    for output in ([], ["-o", "-"]):
        code, said = run(name, "--gpu", "4xh100", *output)
        assert (code, "E1300 BuildConfigInvalid: convert.args.tp_size: 4" in said) == (1, True)
        assert "must divide the model's 32 heads" in said


def test_commands_have_the_file_by_its_path() -> None:
    name = model(LLAMA_8B)
    assert run(name, "--gpu", "l40s", "-o", "my configs/it.yaml")[0] == 0
    assert "build --check 'my configs/it.yaml'\n" in Path("my configs/it.yaml").read_text()


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
        ({**LLAMA_8B, "num_hidden_layers": None}, ["--gpu", "l4"], "num_hidden_layers: missing"),
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
