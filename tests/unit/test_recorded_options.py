"""Recorded options of TensorRT-LLM's scripts, and the script that records them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from cog_triton.builder.options.script_options import (
    KnownOptions,
    Option,
    known_options,
    known_scripts,
)

ROOT = Path(__file__).parents[2]
DATA = ROOT / "cog_triton" / "builder" / "options" / "data"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CORE = (
    "bert commandr enc_dec gemma glm-4-9b gpt internlm2 llama mamba mllama nemotron_nas phi qwen"
    " recurrentgemma vit whisper"
)
CONTRIB = (
    "baichuan bloom cogvlm dbrx deepseek_v1 deepseek_v2 dit falcon gptj gptneox grok mmdit mpt opt"
    " stdit"
)
QWEN = (
    "model_dir output_dir dtype tp_size pp_size cp_size use_weight_only weight_only_precision"
    " disable_weight_only_quant_plugin calib_dataset smoothquant per_channel per_token"
    " int8_kv_cache per_group group_size load_model_on_cpu use_parallel_embedding"
    " embedding_sharding_dim workers moe_tp_size moe_ep_size"
)
GPT = (
    "model_dir nemo_ckpt_path gpt_variant tp_size pp_size dtype load_model_on_cpu"
    " use_parallel_embedding embedding_sharding_dim use_weight_only weight_only_precision"
    " calib_dataset int8_kv_cache per_channel per_token smoothquant dataset_cache_dir"
    " output_dir workers log_level nemo_rename_key"
)
BUILD = (
    "checkpoint_dir model_config build_config model_cls_file model_cls_name output_dir"
    " max_batch_size max_input_len max_seq_len max_decoder_seq_len max_beam_width"
    " max_num_tokens opt_num_tokens max_encoder_input_len max_prompt_embedding_table_size"
    " max_multimodal_len kv_cache_type paged_kv_cache input_timing_cache output_timing_cache"
    " profiling_verbosity strip_plan weight_sparsity weight_streaming fast_build workers"
    " log_level enable_debug_output visualize_network dry_run monitor_memory logits_dtype"
    " lora_dir lora_ckpt_source lora_target_modules max_lora_rank speculative_decoding_mode"
    " max_draft_len gpt_attention_plugin use_fp8_context_fmha reduce_fusion"
)
COMMANDS = {"trtllm-build": "build", "trtllm-refit": "refit", "trtllm-prune": "prune"}


def known(script: str) -> KnownOptions:
    found = known_options(script)
    assert found is not None, script
    return found


def by_name(script: str) -> dict[str, Option]:
    return {name: option for option in known(script).options.options for name in option.names}


def test_every_script_is_recorded() -> None:
    assert set(known_scripts()) == {
        *(f"models/core/{model}/convert_checkpoint.py" for model in CORE.split()),
        *(f"models/contrib/{model}/convert_checkpoint.py" for model in CONTRIB.split()),
        *(f"{way}/convert_checkpoint.py" for way in ("eagle", "medusa", "redrafter")),
        "quantization/quantize.py",
        "quantization/quantize_mixed_precision_moe.py",
        *COMMANDS,
        *("gpt/hf_gpt_convert.py", "gpt/build.py", "llama/build.py"),
    }
    assert list(known_scripts()) == sorted(known_scripts())


@pytest.mark.parametrize("script", ["", "no/such.py", "models", "../options", "trtllm-build.json"])
def test_other_scripts_are_unknown(script: str) -> None:
    assert known_options(script) is None


@pytest.mark.parametrize("script", known_scripts())
def test_data_is_well_formed(script: str) -> None:
    found = known(script)
    # Nothing is left out and nothing is made up on the way.
    as_written = json.loads((DATA / f"{script}.json").read_text("utf-8"))
    assert json.loads(json.dumps(dataclasses.asdict(found))) == as_written
    command = COMMANDS.get(script)
    path = f"tensorrt_llm/commands/{command}.py" if command else f"examples/{script}"
    assert (found.source.repository, found.source.path) == ("NVIDIA/TensorRT-LLM", path)
    for source in (found.source, *(resolved.source for resolved in found.resolved)):
        assert re.fullmatch("[0-9a-f]{40}", source.commit)
        assert source.version is None or re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", source.version)
    assert all(resolved.names for resolved in found.resolved)


@pytest.mark.parametrize("script", known_scripts())
def test_options_are_well_formed(script: str) -> None:
    options = known(script).options
    assert options.complete
    assert options.abbreviations
    assert options.positionals == ()
    names = [name for option in options.options for name in option.names]
    assert len(names) == len(set(names)) >= 3
    for option in options.options:
        assert option.names
        assert all(re.fullmatch("[a-z][a-z0-9_-]*", name) for name in option.names), option
        assert option.nargs in (None, 0, 2, "?", "+"), option
        assert option.type in (None, "str", "int", "float") or option.type.endswith("()"), option
        if option.nargs == 0:
            assert (option.type, option.choices, option.required) == (None, None, False), option
        if option.choices is not None:
            assert 0 < len(option.choices) == len(set(option.choices)), option
            default_is_told = option.default not in (None, "False")
            simple = option.type in (None, "str", "int")
            assert not (simple and default_is_told) or option.default in option.choices, option
        for text in (option.label, option.default, *(option.choices or ())):
            assert text is None or len(text) < 60, f"{option}: a help text?"


def test_options_of_qwen() -> None:
    options = by_name("models/core/qwen/convert_checkpoint.py")
    assert set(options) == set(QWEN.split())
    assert options["model_dir"].required
    assert options["dtype"].choices == ("auto", "float16", "bfloat16", "float32")
    assert (options["smoothquant"].type, options["tp_size"].type) == ("float", "int")
    assert (options["embedding_sharding_dim"].choices, options["embedding_sharding_dim"].type) == (
        ("0", "1"),
        "int",
    )
    assert options["weight_only_precision"].nargs == "?"
    assert {"int8", "int4", "int4_gptq"} == set(options["weight_only_precision"].choices or ())


def test_options_of_gpt() -> None:
    options = by_name("models/core/gpt/convert_checkpoint.py")
    assert set(options) == set(GPT.split())
    assert {
        "gpt2",
        "santacoder",
        "starcoder",
        "starcoder2",
        "persimmon",
        "kosmos-2",
        "nemotron",
    } <= {*(options["gpt_variant"].choices or ())}
    assert options["weight_only_precision"].choices == ("int8", "int4")
    assert options["nemo_rename_key"].nargs == "+"


def test_flags_take_no_value() -> None:
    for script, flags in {
        "models/core/qwen/convert_checkpoint.py": "use_weight_only per_channel load_model_on_cpu",
        "models/core/llama/convert_checkpoint.py": "use_fp8 use_nvfp4 load_by_shard",
        "quantization/quantize.py": "quantize_lm_head quant_medusa_head",
        "trtllm-build": "strip_plan weight_sparsity weight_streaming fast_build dry_run"
        " enable_debug_output monitor_memory gather_context_logits gather_generation_logits"
        " gather_all_token_logits",
        "trtllm-prune": "prune_all",
        "gpt/hf_gpt_convert.py": "calibrate-kv-cache load-model-on-cpu",
    }.items():
        options = by_name(script)
        assert [options[flag].nargs for flag in flags.split()] == [0] * len(flags.split())


def test_options_of_trtllm_build() -> None:
    options = by_name("trtllm-build")
    assert set(options) >= set(BUILD.split())
    # Removed with the auto-parallel module, before 1.2.
    assert options.keys().isdisjoint({"auto_parallel", "gpus_per_node", "cluster_key"})
    assert options["kv_cache_type"].choices == ("continuous", "paged", "disabled")
    assert options["profiling_verbosity"].choices == ("layer_names_only", "detailed", "none")
    assert options["max_seq_len"] is options["max_decoder_seq_len"]
    for feature in ("use_paged_context_fmha", "multiple_profiles", "remove_input_padding"):
        assert (options[feature].nargs, options[feature].choices) == (None, ("enable", "disable"))
    assert options["gemm_plugin"].choices == (
        *("auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"),
    )
    assert {"attn_qkv", "mlp_h_to_4h", "mlp_gate"} <= {
        *(options["lora_target_modules"].choices or ())
    }
    assert (options["max_lora_rank"].default, options["max_batch_size"].default) == ("64", "2048")


def test_options_of_other_commands_and_legacy_scripts() -> None:
    assert set(by_name("trtllm-refit")) == {
        "engine_dir",
        "checkpoint_dir",
        "output_dir",
        "log_level",
    }
    assert set(by_name("trtllm-prune")) == {"checkpoint_dir", "prune_all", "out_dir"}
    convert = by_name("gpt/hf_gpt_convert.py")
    assert convert["out-dir"].required
    assert convert["in-file"].required
    assert convert["storage-type"].choices == ("float32", "float16", "bfloat16")
    assert by_name("gpt/build.py")["use_inflight_batching"].nargs == 0
    assert by_name("llama/build.py")["use_gpt_attention_plugin"].choices == (
        *("float16", "bfloat16", "float32"),
    )
    assert {known(s).source.version for s in ("gpt/build.py", "llama/build.py")} == {"0.7.1"}


def test_source_is_shown_as_one_line() -> None:
    assert str(known("trtllm-prune").source) == (
        "NVIDIA/TensorRT-LLM@bca9a33b022d (0.12.0.dev2024072300): tensorrt_llm/commands/prune.py"
    )
    assert str(known("quantization/quantize.py").source) == (
        "NVIDIA/TensorRT-LLM@c8c6df08bd0e: examples/quantization/quantize.py"
    )


def test_data_is_in_the_wheel() -> None:
    included = {file.relative_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert included >= {str(path.relative_to(ROOT)) for path in DATA.rglob("*.json")}


HEAVY = """
import argparse
from enum import Enum
import heavy.models
from heavy import Layer, LEVELS
from heavy.layers import Config, KINDS
from heavy.more import add_more
from near import add_near
from numpy import array

class Mine(Layer, array):
    size: heavy.Size = heavy.size(3)[0]

@heavy.wrapped(deep=True)
def work(model: heavy.models.Model | None = None):
    raise SystemExit("worked")

def level(text):
    return LEVELS.from_string(text)

KEYS = {kind.name: kind for kind in heavy.KINDS}
parser = argparse.ArgumentParser()
parser.add_argument("--model_dir", "-m", required=True, help="A help text.")
parser.add_argument("--mode", type=int, default=Config.Mode.FAST)
parser.add_argument("--kind", choices=list(KINDS.keys()) + ["a"])
parser.add_argument("--level", type=level)
parser.add_argument("--flag", action="store_true")
add_more(parser.add_argument_group("more"))
add_near(parser)
print(heavy.__version__)
work(parser.parse_args())
"""
PLACE = {"repository": "owner/heavy", "commit": COMMIT}
KNOWN = [
    {"name": "heavy.layers.Config.Mode.FAST", "value": 7, "path": "layers.py", **PLACE},
    {"name": "heavy.layers.KINDS", "value": {"a": 1, "b": 2}, "path": "layers.py", **PLACE},
    {"name": "heavy.layers.UNUSED", "value": 1, "path": "layers.py", **PLACE},
    {"name": "--level", "value": ["low", "high"], "path": "level.h", **PLACE},
    {"name": "heavy.more", "path": "heavy/more.py", **PLACE},
]


@pytest.fixture
def read_options(tmp_path: Path):
    (tmp_path / "near.py").write_text("def add_near(parser):\n    parser.add_argument('--near')\n")
    (tmp_path / "tree" / "heavy").mkdir(parents=True)
    (tmp_path / "tree" / "heavy" / "more.py").write_text(
        "from .deep import thing\n"
        "def add_more(group):\n"
        "    group.add_argument('--more', nargs='+')\n"
    )

    def run(script: str, known: list[dict[str, object]], *args: str):
        (tmp_path / "script.py").write_text(script)
        (tmp_path / "known.json").write_text(json.dumps(known))
        place = ["--repository", "owner/scripts", "--path", "a/script.py", "--commit", COMMIT]
        done = subprocess.run(
            [
                *(sys.executable, ROOT / "scripts" / "read-options"),
                *(tmp_path / "script.py", tmp_path / "out" / "data.json", *place),
                *("--known", tmp_path / "known.json", "--root", tmp_path / "tree", *args),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
        data = tmp_path / "out" / "data.json"
        return done, json.loads(data.read_text()) if data.exists() else None

    return run


def test_options_are_read_without_the_imports_of_the_script(read_options) -> None:
    done, data = read_options(HEAVY, KNOWN, "--version", "1.2.3")
    assert done.returncode == 0, done.stderr
    assert "7 options of a/script.py" in done.stdout
    assert data["source"] == {
        "repository": "owner/scripts",
        "path": "a/script.py",
        "commit": COMMIT,
        "version": "1.2.3",
    }
    assert [(r["names"], r["source"]["path"]) for r in data["resolved"]] == [
        (["heavy.layers.Config.Mode.FAST", "heavy.layers.KINDS"], "layers.py"),
        (["--level"], "level.h"),
        (["heavy.more"], "heavy/more.py"),
    ]
    assert data["options"]["complete"]
    assert data["options"]["abbreviations"]
    shown = ("names", "nargs", "type", "choices", "required", "default")
    assert [tuple(option[key] for key in shown) for option in data["options"]["options"]] == [
        (["model_dir"], None, None, None, True, None),
        (["mode"], None, "int", None, False, "7"),
        (["kind"], None, None, ["a", "b"], False, None),  # and not "a" twice
        (["level"], None, "level()", ["low", "high"], False, None),
        (["flag"], 0, None, None, False, "False"),
        (["more"], "+", None, None, False, None),
        (["near"], None, None, None, False, None),
    ]
    assert "help" not in json.dumps(data)


def test_options_are_read_from_the_entry_of_a_command(read_options) -> None:
    script = (
        "import argparse\n"
        "from ..more import add_more\n"
        "def main():\n"
        "    parser = argparse.ArgumentParser()\n"
        "    add_more(parser)\n"
        "    parser.parse_known_args()\n"
    )
    done, data = read_options(script, KNOWN, "--entry", "heavy.commands.run:main")
    assert done.returncode == 0, done.stderr
    assert [option["names"] for option in data["options"]["options"]] == [["more"]]
    assert not data["options"]["complete"]


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("heavy.layers.Config.Mode.FAST", "heavy.layers.Config.Mode.FAST decides about options"),
        ("heavy.layers.KINDS", r"heavy.layers.KINDS.keys\(\).* decides about options"),
        ("heavy.more", "heavy.more.add_more may add options: its module has to be known"),
    ],
)
def test_unknown_dependencies_of_options_are_refused(missing: str, why: str, read_options) -> None:
    done, data = read_options(HEAVY, [name for name in KNOWN if name["name"] != missing])
    assert done.returncode == 1
    assert re.search(why, done.stderr)
    assert data is None


def test_unknown_converter_is_refused(read_options) -> None:
    script = "import argparse, heavy\np = argparse.ArgumentParser()\n"
    done, data = read_options(script + "p.add_argument('--a', type=heavy.T)\np.parse_args()", [])
    assert (done.returncode, data) == (1, None)
    assert "heavy.T converts an option: it has to be known" in done.stderr


def test_commit_must_be_a_full_hash(read_options) -> None:
    done, data = read_options(HEAVY, KNOWN, "--commit", COMMIT[:12])
    assert (done.returncode, data) == (2, None)
    assert "must be a whole commit id of 40 hex digits" in done.stderr
