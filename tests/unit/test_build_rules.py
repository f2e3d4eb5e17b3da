"""Rules between arguments: each refuses its own wrong config, with the nearest value that holds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cog_triton.builder.checks import RULES, Facts, breaches
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.migration import migrate
from cog_triton.cli.build import look
from cog_triton.errors import BuildConfigInvalid, EngineIncompatible, UserError
from cog_triton.sizing.memory_sum import read_shape

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
WRONG: list[tuple[str, str, str]] = [
    ("build: {max_batch_size: -8}", "E1300", "build.args.max_batch_size: -8: must be 1 or more"),
    ("build: {max_beam_width: 0}", "E1300", "build.args.max_beam_width: 0: must be 1 or more"),
    ("build: {max_draft_len: -1}", "E1300", "build.args.max_draft_len: -1: must be 0 or more"),
    ("convert: {tp_size: 0}", "E1300", "convert.args.tp_size: 0: must be 1 or more; nearest: 1"),
    (
        "build: {max_input_len: 2048, max_seq_len: 1024}",
        "E1300",
        "build.args.max_seq_len: 1024: must be max_input_len, 2048, or more; nearest: 2048",
    ),
    (
        "build: {max_batch_size: 64, max_num_tokens: 16}",
        "E1300",
        "build.args.max_num_tokens: 16: must be max_batch_size, 64, or more; nearest: 64",
    ),
    (
        "convert: {tp_size: 64}",
        "E1300",
        "convert.args.tp_size: 64: must divide the model's 32 heads, and its 8 KV heads divide it"
        " or it them; nearest: 32",
    ),
    ("convert: {tp_size: 3}", "E1300", "KV heads divide it or it them; nearest: 2"),
    (
        "convert: {pp_size: 40}",
        "E1300",
        "convert.args.pp_size: 40: must be the model's 32 layers at most; nearest: 32",
    ),
    (
        "{sm: 89, convert: {use_nvfp4: true}}",
        "E1305",
        "convert.args.use_nvfp4: true: needs sm_100 or later, and this is for sm_89; nearest: left",
    ),
    (
        "{sm: 75, convert: {dtype: bfloat16}}",
        "E1305",
        "convert.args.dtype: 'bfloat16': needs sm_80 or later, and this is for sm_75; nearest: flo",
    ),
    ("{sm: 89, build: {gemm_plugin: nvfp4}}", "E1305", "needs sm_100 or later, and this is for sm"),
    (
        "{sm: 86, quantization: fp8, convert: , build: {checkpoint_dir: quantized}}",
        "E1305",
        "quantize.args.qformat: 'fp8': needs sm_89 or later, and this is for sm_86; nearest: int8",
    ),
    ("sm: 999", "E1305", "sm: 999: must be one of 70, 75, 80"),
    (
        "{example_name: openvino, world_size: 2, build: ~, convert: ~}",
        "E1300",
        "world_size: 2: must be 1 with example_name openvino; nearest: 1",
    ),
    (
        "model_id: ./no/such/model",
        "E1304",
        "model_id: './no/such/model': does not exist, and is no id of the hub; nearest: /",
    ),
    (f"model_id: ./{'x' * 300}/model", "E1304", "does not exist, and is no id of the hub"),
    (
        "{sm: 75, quantization: int8_sq, convert: , build: {checkpoint_dir: quantized}}",
        "E1305",
        "quantize.args.qformat: 'int8_sq': needs sm_80 or later, and this is for sm_75; nearest",
    ),
    ("example_name: whisper", "E1301", "example_name: 'whisper': is of encoder-decoder models"),
    ("example_name: multimodal", "E1301", "name the family of its language model"),
    ("example_name: sample_weight_stripping", "E1301", "executable trtllm-prune strips weights"),
    ("example_name: bert", "E1301", "example_name: 'bert': is no model that generates text"),
]
OPENVINO: dict[str, Any] = {
    "script": "build.py",
    "output_dir": "engine",
    "args": {"model_dir": "model", "output_dir": "engine", "max_seq_len": 256},
}
RIGHT: dict[str, Any] = {
    "model_id": "org/model",
    "example_name": "llama",
    "convert": {
        "script": "convert_checkpoint.py",
        "output_dir": "checkpoint",
        "args": {"model_dir": "model", "output_dir": "checkpoint"},
    },
    "build": {
        "executable": "trtllm-build",
        "output_dir": "engine",
        "args": {"checkpoint_dir": "checkpoint", "output_dir": "engine"},
    },
}


def config_of(put: dict[str, Any]) -> dict[str, Any]:
    """RIGHT with `put` over it, of whose steps the arguments are given."""
    config = copy.deepcopy(RIGHT)
    for key, value in put.items():
        if key == "build" and value is None:
            config[key] = OPENVINO
        elif value is None:
            del config[key]
        elif key in ("convert", "build"):
            config[key]["args"] |= value
        else:
            config[key] = value
    return config


def check(config: dict[str, Any], tmp_path: Path) -> list[str]:
    """What ``build --check`` prints."""
    said: list[str] = []
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    look(path, tmp_path / "work", tmp_path / "e.tar", said.append, check=True, plan=False)
    return said


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The SMs of this machine's GPUs."""
    gpus: list[int] = []
    for module in ("checks", "translate"):
        monkeypatch.setattr(f"cog_triton.builder.{module}.visible_gpus", lambda: gpus)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return gpus


def test_right_config_breaks_no_rule(tmp_path: Path) -> None:
    said = check(RIGHT, tmp_path)
    assert said[-1] == f"[check] combinations: OK: none of {len(RULES)} rules is broken"


@pytest.mark.parametrize(("put", "code", "says"), WRONG, ids=[wrong for wrong, _, _ in WRONG])
def test_wrong_config_is_refused_by_its_rule(
    put: str, code: str, says: str, tmp_path: Path
) -> None:
    config = config_of(yaml.safe_load(put))
    if config["model_id"] == RIGHT["model_id"]:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA), "utf-8")
        config["model_id"] = str(tmp_path / "model")
    with pytest.raises(UserError) as refusal:
        check(config, tmp_path)
    assert refusal.value.code == code
    assert says in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


def test_all_breaches_are_reported_at_once(tmp_path: Path) -> None:
    put = {"build": {"max_batch_size": -8, "max_input_len": 9, "max_seq_len": 3}, "sm": 999}
    with pytest.raises(BuildConfigInvalid) as refusal:
        check(config_of(put), tmp_path)
    assert [line.split(":")[0] for line in refusal.value.detail.splitlines()] == [
        "build.args.max_batch_size",
        "build.args.max_seq_len",
        "sm",
    ]


def test_ranks_of_an_unknown_model_are_said_not_to_be_checked(tmp_path: Path) -> None:
    said = check(config_of({"convert": {"tp_size": 3}}), tmp_path)
    assert any("heads and layers are NOT CHECKED: org/model: " in line for line in said)


def test_gpus_of_this_machine_count_unless_the_config_names_another(
    tmp_path: Path, here: list[int]
) -> None:
    here += [86, 86]
    put = {"build": {"gemm_plugin": "fp8"}}
    with pytest.raises(UserError, match="needs sm_89 or later, and this is for sm_86"):
        check(config_of(put), tmp_path)
    with pytest.raises(EngineIncompatible, match="sm 90: an engine is built on the GPU that it is"):
        check(config_of({**put, "sm": 90}), tmp_path)


def test_hostile_numbers_are_refused_in_little_time() -> None:
    huge = {"tp_size": 10**30, "pp_size": 10**18}
    config = config_of({"convert": huge, "build": {"max_seq_len": 10**30, "max_batch_size": 10**9}})
    model = {"hidden_size": 1, "num_attention_heads": 10**12, "num_hidden_layers": 10**15}
    shape = read_shape({**model, "vocab_size": 10**17}, "config.json")
    facts = Facts(BuildConfig.model_validate(config), "llama", (90,), shape)
    assert [breach.where for breach in breaches(facts)] == [
        "convert.args.tp_size",
        "convert.args.pp_size",
    ]


def test_migration_reports_what_no_engine_would_have() -> None:
    config = BuildConfig.model_validate(config_of({"build": {"max_batch_size": -8}, "sm": 999}))
    lost = [finding for finding in migrate(config).findings if finding.verdict == "lost"]
    whys = [finding.why for finding in lost if finding.option == "build.args.max_batch_size"]
    assert whys == ["TensorRT-LLM builds no such engine: must be 1 or more"]
    assert not any("must be one of" in (finding.why or "") for finding in lost)


@pytest.mark.parametrize("name", ["internlm", "exaone", "nemotron", "qwen3"])
def test_alias_of_a_family_is_checked_as_it(name: str, tmp_path: Path) -> None:
    assert check(config_of({"example_name": name}), tmp_path)
