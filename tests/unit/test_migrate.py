"""Migration: of all shipped and all of the original's configs, to vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from cog_triton.builder import migration
from cog_triton.builder.config import BuildConfig, load_config, parse_config
from cog_triton.builder.migration import CONVERSIONS, Migration, migrate
from cog_triton.builder.script_options import Target, recorded, table
from cog_triton.cli.app import app
from cog_triton.engines import model_config_proto
from cog_triton.engines.tensorrt_llm import model_settings
from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.model_directory import read_arguments
from cog_triton.errors import EngineIncompatible, InvalidPredictorConfig
from tests.legacy_configs import ORIGINALS

ROOT = Path(__file__).parents[2]
SHIPPED = {
    path.stem: load_config(path)
    for path in sorted((ROOT / "configs" / "build").glob("*.yaml"))
    if not path.stem.endswith("-cpu") and not path.stem.startswith("vllm-")
}
CONFIGS = SHIPPED | {name: parse_config(text, name) for name, text in ORIGINALS.items()}
WEIGHTS = {"llama-2-7b-chat-int8", "llama-2-13b-chat-int8-2gpu", "llama-2-70b-chat-int8-2gpu"}
LOST = {
    **{name: {"convert.args.weight_only_precision"} for name in WEIGHTS},
    "llama-3.1-8b-instruct-int8-sm86": {"convert.args.weight_only_precision"},
    "llama-2-7b-chat-smoothquant": {"convert.args.smoothquant"},
    "llama-2-13b-chat-smoothquant": {"convert.args.smoothquant"},
    "llama-3.1-8b-instruct-int4-awq-sm86": {"quantize.args.qformat"},
    "llama-3.1-70b-instruct-int4-awq-4gpu-sm86": {"quantize.args.qformat"},
    "gpt/starcoder": {
        "hf_token",
        "convert_to_ft.args.smoothquant",
        "convert_to_ft.args.int8_kv_cache",
    },
    "llama/llama-2-7b-chat-int8-1gpu": {"convert_to_ft.args.weight_only_precision"},
    "llama/llama-2-13b-chat-int8-2gpu": {"convert_to_ft.args.weight_only_precision"},
    "llama/llama-2-13b-chat-1gpu": {"build.args.checkpoint_dir"},
    "llama/llama-2-13b-chat-sq-1gpu": {"build.args.checkpoint_dir"},
}
"""What is lost to vLLM, by config; nothing of the others."""


def lost(found: Migration) -> set[str]:
    return {finding.option for finding in found.findings if finding.verdict == "lost"}


def config(text: str, **top: object) -> BuildConfig:
    """A config whose build.args are the inside of a YAML mapping."""
    args = yaml.safe_load(f"{{checkpoint_dir: c, output_dir: e, {text}}}")
    build = {"executable": "trtllm-build", "output_dir": "e", "args": args}
    raw = {"model_id": "org/name", "example_name": "llama", "build": build, **top}
    return parse_config(yaml.safe_dump(raw), "c.yaml")


@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_takes_what_comes_of_a_config(name: str, tmp_path: Path) -> None:
    found = migrate(CONFIGS[name])
    (tmp_path / "model.json").write_text(migration.text_of(found), "utf-8")
    assert read_arguments(tmp_path) == found.arguments
    assert lost(found) == LOST.get(name, set())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_option_has_a_line(name: str) -> None:
    found = migrate(SHIPPED[name])
    own = {"world_size", "lora_adapters"}
    given = {"model_id", "example_name"} | SHIPPED[name].model_fields_set & own
    for step_name, step in SHIPPED[name].steps():
        given |= {f"{step_name}.args.{option}" for option in step.args}
    if (runtime := SHIPPED[name].runtime) is not None:
        given |= {f"runtime.{setting}" for setting in runtime.model_dump(exclude_none=True)}
    assert {finding.option for finding in found.findings} == given
    assert all(finding.why for finding in found.findings if finding.verdict != "carries")


def test_an_engine_of_another_kind_is_refused() -> None:
    demo = load_config(ROOT / "configs" / "build" / "smollm2-135m-cpu.yaml")
    with pytest.raises(EngineIncompatible, match="makes no engine of TensorRT-LLM"):
        migrate(demo)


def texts(rule: Target) -> list[Target]:
    return [rule, *rule.values.values(), *([rule.others] if rule.others else [])]


def test_the_table_has_every_option_there_is() -> None:
    picture = ("dit", "mmdit", "stdit", "vit", "bert", "enc_dec", "whisper")
    ruled = {section: targets(section) for section in table()}
    for script, known in recorded().items():
        section = {"trtllm-build": "build", "quantization/quantize.py": "quantize"}.get(script)
        if script.startswith("models/") and script.split("/")[2] not in picture:
            section = "convert"
        if section is not None:
            names = {name.replace("-", "_") for name in known.names}
            assert names - ruled[section].keys() <= IMAGE_OPTIONS, script
    template = model_settings.template_path().read_text("utf-8")
    assert model_config_proto.variables(template) <= ruled["serve"].keys()
    of_steps = {"model_id", "convert", "convert_to_ft", "quantize", "build", "runtime"}
    assert set(BuildConfig.model_fields) - of_steps <= ruled["config"].keys()


def targets(section: str) -> dict[str, Target]:
    """The options of a section that have a rule for vLLM."""
    return {
        name: row.vllm for name, row in table()[section].items() if "vllm" in row.model_fields_set
    }


IMAGE_OPTIONS = {"vision_tp_size", "vision_cp_size", "eclair_radio", "nougat"}


def test_the_table_names_what_targets_have() -> None:
    for section in table():
        for rule in targets(section).values():
            for one in texts(rule):
                assert one.convert is None or one.convert in CONVERSIONS
                paths = [one.to, *one.also]
                for path in filter(None, paths):
                    group, _, name = path.rpartition(".")
                    assert (group or name) in types_of().engine_args, path


WORDS = {"quantization": "fp8", "kv_cache_dtype": "fp8", "tensor_parallel": 2}
SETTINGS = {
    "kv_cache_free_gpu_mem_fraction": "0.8",
    "kv_cache_host_memory_bytes": 2 << 30,
    "batch_scheduler_policy": "guaranteed_no_evict",
}


@pytest.mark.parametrize(
    ("build", "top", "settings", "becomes", "gone"),
    [
        ("", WORDS, {}, {**WORDS, "tensor_parallel_size": 2}, []),
        (
            "max_seq_len: 4096",
            {},
            SETTINGS,
            {"kv_offloading_size": 2.0, "gpu_memory_utilization": 0.8, "max_model_len": 4096},
            ["tensorrt_llm.args.batch_scheduler_policy"],
        ),
        (
            "lora_plugin: auto, lora_target_modules: [attn_q, attn_v]",
            {},
            {},
            {"enable_lora": True, "max_lora_rank": 64, "lora_target_modules": ["q_proj", "v_proj"]},
            [],
        ),
        ("lora_plugin: auto, max_lora_rank: 20", {}, {}, {"max_lora_rank": 32}, []),
        (
            "speculative_decoding_mode: medusa, max_draft_len: 63",
            {},
            {},
            {},
            ["build.args.speculative_decoding_mode", "build.args.max_draft_len"],
        ),
    ],
)
def test_what_options_become(
    build: str,
    top: dict[str, object],
    settings: dict[str, object],
    becomes: dict[str, object],
    gone: list[str],
) -> None:
    found = migrate(config(build, **top), settings)
    expected = {key: value for key, value in becomes.items() if key != "tensor_parallel"}
    assert found.arguments == {**found.arguments, **expected}
    assert {*gone} <= lost(found)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(InvalidPredictorConfig, match="kv_cache_free_gpu_mem_fraktion"):
        migrate(config(""), {"kv_cache_free_gpu_mem_fraktion": 0.8})


def test_a_legacy_option_without_a_translation_is_lost_with_its_reason() -> None:
    legacy = parse_config(ORIGINALS["gpt/config"].replace("out-dir", "weird: 1\n    out-dir"), "c")
    findings = {finding.option: finding for finding in migrate(legacy).findings}
    assert findings["convert_to_ft.args.weird: 1"].verdict == "lost"
    assert "no rule" in str(findings["convert_to_ft.args.weird: 1"].why)


def test_a_directory_is_named_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    found = migrate(config("", model_id="./model"))
    assert json.loads(migration.text_of(found))["model"] == str(tmp_path / "model")


INT8 = str(ROOT / "configs" / "build" / "llama-2-7b-chat-int8.yaml")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["migrate", *arguments])


@pytest.mark.usefixtures("here")
def test_writes_a_directory_and_says_what_is_lost() -> None:
    result = run(INT8)
    assert result.exit_code == 0, result.output
    written = json.loads(Path("llama-2-7b-chat-int8-vllm/model.json").read_text("utf-8"))
    assert written["max_model_len"] == 4096
    lines = result.output.splitlines()
    assert any(
        line.startswith("[lost] convert.args.weight_only_precision: 'int8'") for line in lines
    )
    assert any(line.startswith("[unneeded] build.args.gemm_plugin") for line in lines)
    assert "1 lost" in result.output
    assert "cog-triton serve llama-2-7b-chat-int8-vllm" in result.output


@pytest.mark.usefixtures("here")
def test_overwrites_only_when_told() -> None:
    assert run(INT8, "-o", "engine").exit_code == 0
    again = run(INT8, "-o", "engine")
    assert again.exit_code == 1
    assert "E1005" in again.output
    assert "--force" in again.output
    assert run(INT8, "-o", "engine", "--force").exit_code == 0


@pytest.mark.usefixtures("here")
def test_takes_a_file_or_prints_it() -> None:
    assert run(INT8, "-o", "mine.json").exit_code == 0
    assert json.loads(Path("mine.json").read_text("utf-8"))["model"]
    wrong = run(INT8, "-o", "mine.yaml")
    assert wrong.exit_code == 1
    assert "must be a directory, or end in .json" in wrong.output
    printed = run(INT8, "-o", "-")
    assert json.loads(printed.stdout) == json.loads(Path("mine.json").read_text("utf-8"))
    assert "[lost]" in printed.stderr


@pytest.mark.usefixtures("here")
def test_strict_ends_in_2_when_something_is_lost() -> None:
    assert run(INT8, "--strict").exit_code == 2
    whole = str(ROOT / "configs" / "build" / "qwen3-8b.yaml")
    assert run(whole, "--strict").exit_code == 0


@pytest.mark.usefixtures("here")
def test_takes_the_serve_config_along() -> None:
    Path("serve.yaml").write_text("tensorrt_llm: {args: {enable_kv_cache_reuse: false}}", "utf-8")
    assert run(INT8, "--serve-config", "serve.yaml", "-o", "e").exit_code == 0
    assert json.loads(Path("e/model.json").read_text("utf-8"))["enable_prefix_caching"] is False


@pytest.mark.usefixtures("here")
def test_a_config_for_vllm_needs_none() -> None:
    result = run(str(ROOT / "configs" / "build" / "vllm-qwen3-8b.yaml"))
    assert result.exit_code == 1
    assert "there is nothing to migrate" in result.output
