"""Rules of combinations: each refuses its own wrong config, with the nearest value that holds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cog_triton.builder.breaches import RECORDED, Facts, Version, installed_version
from cog_triton.builder.checks import breaches_of, rules
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.migration import migrate
from cog_triton.cli.build import look
from cog_triton.errors import BuildConfigInvalid, EngineIncompatible, UnknownExample, UserError
from cog_triton.sizing.memory_sum import read_shape

WRONG: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "wrong_combinations.yaml").read_text("utf-8")
)
OPENVINO: dict[str, Any] = {
    "convert": {
        "script": "convert_checkpoint.py",
        "output_dir": "checkpoint",
        "args": {"model_dir": "model", "output_dir": "checkpoint"},
    },
    "build": {
        "script": "build.py",
        "output_dir": "engine",
        "args": {"checkpoint_dir": "checkpoint", "output_dir": "engine", "max_seq_len": 256},
    },
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
        if value is None:
            config[key] = OPENVINO[key]
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


def broken(config: dict[str, Any], family: str, version: Version = (1, 0)) -> list[str]:
    facts = Facts(BuildConfig.model_validate(config), family, version)
    return [rule.name for rule, _ in breaches_of(facts)]


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cog_triton.builder.checks.visible_gpus", list)
    monkeypatch.setattr("cog_triton.builder.upgrade.visible_gpus", list)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_right_config_breaks_no_rule(tmp_path: Path) -> None:
    said = check(RIGHT, tmp_path)
    assert said[-1] == f"[check] combinations: OK: none of {len(rules())} rules is broken"


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{w['rule']}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_config_is_refused_by_its_rule(wrong: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(wrong["put"])
    if "model" in wrong:
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(wrong["model"]), "utf-8")
        config["model_id"] = str(model)
    with pytest.raises(UserError) as refusal:
        check(config, tmp_path)
    said = str(refusal.value)
    assert refusal.value.code == wrong["code"]
    assert wrong["says"] in said
    rule = next(rule for rule in rules() if rule.name == wrong["rule"])
    assert f"({rule.name}: {rule.why})" in said
    assert said.count("\n") == 0


def test_every_rule_of_today_has_a_wrong_config() -> None:
    today = {rule.name for rule in rules() if rule.until is None}
    assert {wrong["rule"] for wrong in WRONG} == today
    assert len(WRONG) >= 25


@pytest.mark.parametrize("name", ["x" * 300, f"./{'x' * 300}/model"])
def test_model_whose_name_no_file_can_have_is_no_model(name: str) -> None:
    assert broken({**RIGHT, "model_id": name}, "llama") == ["model"]


def test_all_breaches_are_told_at_once(tmp_path: Path) -> None:
    put = {"build": {"max_batch_size": -8, "max_input_len": 9, "max_seq_len": 3}, "sm": 999}
    with pytest.raises(BuildConfigInvalid) as refusal:
        check(config_of(put), tmp_path)
    assert [line.split(":")[0] for line in refusal.value.detail.splitlines()] == [
        "build.args.max_batch_size",
        "build.args.max_seq_len",
        "sm",
    ]


@pytest.mark.parametrize(
    ("put", "family", "old", "of_old"),
    [
        ({"build": {"streamingllm": "enable"}}, "qwen", (0, 14), ["StreamingLLM"]),
        (
            {"convert": {"use_weight_only": True}, "build": {"fast_build": True}},
            "llama",
            (0, 14),
            ["fast build"],
        ),
        ({"build": {"max_seq_len": 1, "max_input_len": 2}}, "llama", (1, 0), ["input in sequence"]),
        ({"build": {"max_seq_len": 1, "max_input_len": 2}}, "llama", (0, 9), []),
    ],
)
def test_rules_are_of_their_versions(
    put: dict[str, Any], family: str, old: Version, of_old: list[str]
) -> None:
    assert broken(config_of(put), family, old) == of_old
    if of_old != ["input in sequence"]:
        assert broken(config_of(put), family) == ([] if of_old else ["input in sequence"])


def test_old_layers_are_divided_evenly() -> None:
    model = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 9}
    config = BuildConfig.model_validate(config_of({"convert": {"pp_size": 4}}))
    shape = read_shape(model, "config.json")
    for version, names in (((0, 14), ["layers by ranks"]), ((1, 0), [])):
        facts = Facts(config, "llama", version, (), model, shape)
        assert [rule.name for rule, _ in breaches_of(facts)] == names


def test_ranks_of_an_unknown_model_are_said_not_to_be_checked(tmp_path: Path) -> None:
    said = check(config_of({"convert": {"tp_size": 3}}), tmp_path)
    assert any("heads, layers and vocabulary are NOT CHECKED: org/model: " in line for line in said)


def test_gpus_of_this_machine_count_unless_the_config_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.builder.checks.visible_gpus", lambda: [86, 86])
    put = {"build": {"use_fused_mlp": "enable", "gemm_swiglu_plugin": "fp8"}}
    with pytest.raises(UserError, match="needs sm_90, and this is for sm_86"):
        check(config_of(put), tmp_path)
    monkeypatch.setattr("cog_triton.builder.upgrade.visible_gpus", lambda: [86])
    with pytest.raises(EngineIncompatible, match="sm 90: an engine is built on the GPU that it is"):
        check(config_of({**put, "sm": 90}), tmp_path)


@pytest.mark.parametrize(
    "put",
    [
        {"convert": {"use_fp8": True}},
        {"convert": {"quant_ckpt_path": "/q"}},
        {"model_id": "org/model-FP8"},
    ],
)
def test_checkpoint_may_be_fp8_in_many_ways(put: dict[str, Any]) -> None:
    asked = {"build": {"use_fp8_context_fmha": "enable"}}
    assert broken(config_of(asked), "llama") == ["FP8 attention"]
    assert broken(config_of({**asked, **put}), "llama") == []


@pytest.mark.parametrize(("version", "found"), [("0.9.0", (0, 9)), ("1.2.1", (1, 2)), (None, None)])
def test_version_is_that_of_the_tree(
    version: str | None, found: Version | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    if version is not None:
        text = f'# {version}\n__version__ = "{version}"\n'
        (tmp_path / "tensorrt_llm" / "version.py").write_text(text, "utf-8")
    monkeypatch.setenv("TRTLLM_DIR", str(tmp_path))
    assert installed_version(recorded=True) == (found or RECORDED)
    assert installed_version(recorded=False) == (found or (0, 9))


def test_hostile_numbers_are_refused_in_little_time() -> None:
    huge = {"tp_size": 10**30, "moe_tp_size": 7, "moe_ep_size": -3, "pp_size": 10**18}
    config = config_of({"convert": huge, "build": {"max_seq_len": 10**30, "max_batch_size": 10**9}})
    model = {"hidden_size": 1, "num_attention_heads": 10**12, "num_hidden_layers": 10**15}
    shape = read_shape({**model, "vocab_size": 10**17}, "config.json")
    facts = Facts(BuildConfig.model_validate(config), "llama", (0, 14), (90,), {}, shape)
    assert [rule.name for rule, _ in breaches_of(facts)] == [
        "volume",
        "heads by ranks",
        "layers by ranks",
        "experts by ranks",
    ]


@pytest.mark.parametrize(("qformat", "found"), [("int8_sq", ["types by SM"]), ("int4_awq", [])])
def test_turing_has_awq_and_no_smoothquant(qformat: str, found: list[str]) -> None:
    config = config_of({})
    args = {"model_dir": "model", "output_dir": "q", "qformat": qformat}
    config["quantize"] = {"script": "quantize.py", "output_dir": "q", "args": args}
    facts = Facts(BuildConfig.model_validate(config), "llama", (0, 9), (75,))
    assert [rule.name for rule, _ in breaches_of(facts)] == found


def test_migration_tells_what_no_engine_would_have() -> None:
    config = BuildConfig.model_validate(config_of({"build": {"max_batch_size": -8}, "sm": 999}))
    lost = [finding for finding in migrate(config).findings if finding.verdict == "lost"]
    whys = [finding.why for finding in lost if finding.option == "build.args.max_batch_size"]
    assert whys == ["TensorRT-LLM builds no such engine: must be 1 or more (counts)"]
    assert not any("known SM" in (finding.why or "") for finding in lost)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("multimodal", "name the family of its language model"),
        ("draft_target_model", "named in vLLM's speculative_config"),
        ("sample_weight_stripping", "executable trtllm-prune strips weights"),
    ],
)
def test_directory_that_is_no_family_says_what_to_name(
    name: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownExample, match=says):
        check(config_of({"example_name": name}), tmp_path)


@pytest.mark.parametrize(
    "name", ["internlm", "skywork", "smaug", "arctic", "exaone", "nemotron", "jais"]
)
def test_alias_of_a_family_is_checked_as_it(name: str, tmp_path: Path) -> None:
    assert check(config_of({"example_name": name}), tmp_path)
