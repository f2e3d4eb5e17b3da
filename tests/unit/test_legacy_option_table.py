"""Legacy options: every rule of the option table."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given as drawn
from hypothesis import strategies as st
from legacy_configs import gpt, llama, modern, refusal, translated

from cog_triton.builder.config import BuildConfig
from cog_triton.builder.plan import Families
from cog_triton.builder.script_options import ArgumentValue, Today, known_options, table
from cog_triton.builder.translate import Translation, translate
from cog_triton.errors import UnknownArgument

Args = dict[str, ArgumentValue]


def becomes(role: str) -> dict[str, list[Today]]:
    """What the options of a step become today, by name."""
    return {
        name: [today for today in (row.now, row.legacy) if today is not None]
        for name, row in table()[role].items()
    }


@pytest.mark.parametrize(
    ("script", "role"),
    [("gpt/hf_gpt_convert.py", "convert"), ("gpt/build.py", "build"), ("llama/build.py", "build")],
)
def test_every_legacy_option_has_a_rule(script: str, role: str) -> None:
    known = known_options(script)
    assert known is not None
    ruled = {name for name, found in becomes(role).items() if found}
    assert {name.replace("-", "_") for name in known.names} - ruled == set()


def test_rules_name_options_that_exist_today() -> None:
    scripts = {
        "build": ["trtllm-build"],
        "quantize": ["quantization/quantize.py"],
        "convert": [
            f"models/core/{family}/convert_checkpoint.py" for family in ("gpt", "llama", "enc_dec")
        ],
    }
    there = {
        role: {n for s in names if (known := known_options(s)) for n in known.names}
        for role, names in scripts.items()
    }
    for role in scripts:
        for today in (each for found in becomes(role).values() for each in found if each.to):
            step, _, name = str(today.to).rpartition(".")
            assert name in there[step or role], today
    # What is still there must not be translated; one is deprecated, one was a bare flag.
    now = {name for name, row in table()["build"].items() if row.now}
    assert there["build"] & now == {"paged_kv_cache", "use_fused_mlp"}


def test_option_missing_in_a_family_is_refused_by_its_legacy_name() -> None:
    assert "build.args.per_group: no value: cannot be translated: models/core/gpt/convert" in (
        refusal(gpt(build="per_group: "))
    )


CONVERT_RULES = {
    "i: /src/models/m": {"model_dir": "/src/models/m"},
    "tp: 2": {"tp_size": 2},
    "storage_type: fp16": {"dtype": "float16"},
    "load-model-on-cpu: ": {"load_model_on_cpu": None},
    "load-model-on-cpu: , convert-model-on-cpu: ": {"load_model_on_cpu": None},
    "kv: ": {},
    "load-model-on-cpu: false": {},
}


@pytest.mark.parametrize("given", CONVERT_RULES)
def test_options_of_hf_gpt_convert(given: str) -> None:
    convert = f"{given}, storage-type: float16" if "storage" not in given else given
    if given.startswith("i:"):
        config = gpt("storage-type: float16")
        assert config.convert_to_ft is not None
        args = {"i": "/src/models/m", **config.convert_to_ft.args}
        del args["in-file"]
        step = config.convert_to_ft.model_copy(update={"args": args})
        config = config.model_copy(update={"convert_to_ft": step})
    else:
        config = gpt(convert)
    after = translated(config).config.convert_to_ft
    assert after is not None
    assert after.args == {
        "model_dir": "/src/models/m",
        "output_dir": "c/1-gpu",
        "gpt_variant": "gpt2",
        "dtype": "float16",
        **CONVERT_RULES[given],
    }


BUILD_RULES = {
    "use_gpt_attention_plugin: ": {"gpt_attention_plugin": "auto"},
    "use_gpt_attention_plugin: bfloat16": {"gpt_attention_plugin": "bfloat16"},
    "enable_context_fmha: ": {"context_fmha": "enable"},
    "enable_context_fmha: false": {"context_fmha": "disable"},
    "paged_kv_cache: ": {"kv_cache_type": "paged"},
    "paged_kv_cache: false": {"kv_cache_type": "continuous"},
    "tokens_per_block: 64": {"tokens_per_block": 64},
    "max_input_len: 500, max_output_len: 100": {"max_input_len": 500, "max_seq_len": 600},
    "parallel_build: ": {},
    "world_size: 4, tp_size: 2, pp_size: 2, parallel_build: ": {},
    "multi_block_mode: ": {},
    "n_positions: 1000, vocab_size: 5, hidden_act: silu": {},
    "builder_opt: false": {},
}


@pytest.mark.parametrize("given", BUILD_RULES)
def test_options_of_build_py(given: str) -> None:
    after = translated(llama(given))
    assert after.config.build.args == {
        "checkpoint_dir": "checkpoint",
        "output_dir": "e",
        **BUILD_RULES[given],
    }
    for option in yaml.safe_load(f"{{{given}}}"):
        if option not in BUILD_RULES[given]:
            assert any(f"build.args.{option}" in note for note in after.notes)


MOVED_RULES = {
    "dtype: bfloat16": {"dtype": "bfloat16"},
    "world_size: 2": {"tp_size": 2},
    "world_size: 2, tp_size: 2": {"tp_size": 2},
    "tp_size: 2, pp_size: 2, world_size: 4": {"tp_size": 2, "pp_size": 2},
    "quant_ckpt_path: /q.safetensors": {"quant_ckpt_path": "/q.safetensors"},
}


@pytest.mark.parametrize("given", MOVED_RULES)
def test_options_of_build_py_that_move_to_a_new_convert_step(given: str) -> None:
    config = translated(llama(given, env={"A": "1"}, timeout=9.0)).config
    assert config.convert is not None
    assert config.convert.script == "convert_checkpoint.py"
    assert config.convert.output_dir == "checkpoint"
    assert config.convert.args == {
        "model_dir": "/src/models/m",
        "output_dir": "checkpoint",
        "dtype": "float16",
        **MOVED_RULES[given],
    }
    assert config.build.args == {"checkpoint_dir": "checkpoint", "output_dir": "e"}


LATER_RULES = {
    ("storage-type: fp16", ""): ({"dtype": "float16"}, {}),
    ("hf_lora_dir: /lora", ""): ({}, {"lora_dir": "/lora"}),
    ("", "paged_kv_cache: enable"): ({}, {"kv_cache_type": "paged"}),
    ("", "paged_kv_cache: disable"): ({}, {"kv_cache_type": "continuous"}),
    ("", "max_input_len: 9, max_output_len: 512"): (
        {},
        {"max_input_len": 9, "max_seq_len": 521},
    ),
    ("", "multi_block_mode: enable"): ({}, {}),
    ("tp_size: 2", "tp_size: 2"): ({"tp_size": 2}, {}),
}


@pytest.mark.parametrize("given", LATER_RULES)
def test_options_of_intermediate_releases(given: tuple[str, str]) -> None:
    after = translated(modern(*given))
    convert, build = LATER_RULES[given]
    assert after.notes
    assert after.config.convert is not None
    assert after.config.convert.args == {"model_dir": "model", "output_dir": "c", **convert}
    assert after.config.build.args == {"checkpoint_dir": "c", "output_dir": "e", **build}


REFUSED = {
    "use_gemm_plugn: ": "build.args.use_gemm_plugn: no value: cannot be translated: there is no"
    " rule for it; did you mean 'use_gemm_plugin'?",
    "max_seq_len: 9": "build.args.max_seq_len: 9: cannot be translated: there is no rule for it",
    "rotary_scaling: [linear, 2]": "build.args.rotary_scaling: ['linear', 2]: cannot be translated:"
    " position embeddings are",
    "auto_parallel: 2": (
        "build.args.auto_parallel: 2: cannot be translated: tp_size and pp_size of the convert step"
        " say it"
    ),
    "weight_only_precision: int4_awq": "AWQ checkpoints come from quantize.py",
    "quant_ckpt_path: /q.npz": "build.args.quant_ckpt_path: '/q.npz': cannot be translated: only a"
    " .safetensors file",
    "use_smooth_quant: ": "build.args.use_smooth_quant: no value: cannot be translated: it needs"
    " smoothquant of convert",
    "world_size: 4, tp_size: 2": "build.args.world_size: 4: cannot be translated: it is not tp_s",
    "max_output_len: 100": "max_seq_len is its sum with max_input_len: give both",
    "max_output_len: many": "build.args.max_output_len: 'many': cannot be translated: max_seq_len",
    "paged_kv_cache: 1": "build.args.paged_kv_cache: 1: cannot be translated: it is enable or",
    "multi_block_mode: 1": "build.args.multi_block_mode: 1: cannot be translated: the server's",
}


@pytest.mark.parametrize("given", REFUSED)
def test_untranslatable_options_are_refused_by_name(given: str) -> None:
    message = refusal(llama(given))
    assert message.startswith("E1303 UnknownArgument: build.args.")
    assert REFUSED[given] in message


@pytest.mark.parametrize(
    ("convert", "build", "message"),
    [
        ("t: 1", "", "convert_to_ft.args.t: 1: cannot be translated: it may be storage-type or"),
        ("in-fil: x", "", "convert_to_ft.args.in-fil: 'x': cannot be translated: there is no rule"),
        (
            "storage-type: float32",
            "dtype: float16",
            "build.args.dtype: 'float16': cannot be translated: convert_to_ft.args.storage-type:"
            " 'float32' says otherwise",
        ),
        ("tp: 2", "world_size: 1", "build.args.world_size: 1: cannot be translated: convert_to_ft"),
        (
            "smoothquant: 0.5",
            "",
            "convert_to_ft.args.smoothquant: 0.5: cannot be translated: it needs smoothquant of",
        ),
        ("storage_type: fp16, storage-type: fp16", "", "with dashes and underscores"),
    ],
)
def test_contradicting_steps_are_refused(convert: str, build: str, message: str) -> None:
    assert message in refusal(gpt(convert, build))


REMOVED = yaml.safe_load((Path(__file__).parent / "golden" / "removed_options.yaml").read_text())
COMMANDS = {"quantize.py": "quantize", "trtllm-build": "build"}
CASES = [(script, option) for script, options in REMOVED.items() for option in options]


def config_of(script: str, args: dict[str, object]) -> BuildConfig:
    step = COMMANDS.get(script, "convert")
    given = {name: args if name == step else {} for name in ("convert", "quantize", "build")}
    return BuildConfig.model_validate(
        {
            "model_id": "m",
            "example_name": "llama" if script in COMMANDS else script,
            "convert": {
                "script": "convert_checkpoint.py",
                "output_dir": "c",
                "args": given["convert"],
            },
            "quantize": {"script": "quantize.py", "output_dir": "q", "args": given["quantize"]},
            "build": {"executable": "trtllm-build", "output_dir": "e", "args": given["build"]},
        }
    )


def of_script(script: str, **args: object) -> Translation:
    config, families = config_of(script, args), Families()
    return translate(config, families.find(config.example_name))


def outcome(script: str, option: str) -> tuple[list[str], dict[str, object]]:
    """Notes or refusals of a translation, and the step's arguments after it."""
    try:
        after = of_script(script, **{option: 1})
    except UnknownArgument as error:
        return error.detail.splitlines(), {}
    step = COMMANDS.get(script, "convert")
    return list(after.notes), dict(dict(after.config.steps())[step].args)


@pytest.mark.parametrize(("script", "option"), CASES)
def test_removed_option_is_translated_or_refused_with_a_reason(script: str, option: str) -> None:
    step = COMMANDS.get(script, "convert")
    said, args = outcome(script, option)
    assert any(line.startswith(f"{step}.args.{option}") for line in said)
    assert option not in args


def test_families_that_still_have_an_option_keep_it() -> None:
    kept = {"dataset_cache_dir": "/d", "load_model_on_cpu": True}
    assert of_script("gpt", **kept).notes == ()
    assert of_script("gemma", **{"ckpt-type": "hf", "world-size": 2}).notes == ()


@pytest.mark.parametrize(
    ("script", "args", "becomes"),
    [
        ("qwen", {"n_layer": 32}, {}),
        ("enc_dec", {"skip_cross_qkv": None}, {"skip_cross_kv": None}),
        ("llama", {"sq": 0.5}, {"smoothquant": 0.5}),
        ("llama", {"kv": None}, {"int8_kv_cache": None}),
        ("quantize.py", {"max_seq_length": 2048}, {"tokenizer_max_seq_length": 2048}),
        (
            "trtllm-build",
            {"use_fused_mlp": None, "strongly_typed": None},
            {"use_fused_mlp": "enable"},
        ),
    ],
)
def test_what_removed_options_become(
    script: str, args: dict[str, object], becomes: dict[str, object]
) -> None:
    after = of_script(script, **args).config
    assert dict(after.steps())[COMMANDS.get(script, "convert")].args == becomes


def test_scripts_of_an_older_tree_keep_their_options() -> None:
    config = modern("use_embedding_sharing: ").model_copy(update={"example_name": "medusa"})
    assert translate(config, "medusa", today=False).config is config
    assert translate(config, "medusa").config is not config


OPTIONS = st.sampled_from(sorted(becomes("convert").keys() | becomes("build").keys()))
VALUES = st.sampled_from([None, True, False, 0, 1, 0.5, "", "enable", "fp16", [1, "a"], "/d"])
ARGS = st.dictionaries(OPTIONS, VALUES, max_size=3)


@drawn(st.sampled_from([gpt(), llama(""), modern()]), ARGS, ARGS)
def test_every_dropped_option_is_noted(config: BuildConfig, first: Args, last: Args) -> None:
    legacy = config.model_copy(
        update={
            name: step.model_copy(update={"args": {**step.args, **args}})
            for (name, step), args in zip(reversed(config.steps()), (last, first), strict=False)
        }
    )
    try:
        after = translated(legacy)
    except UnknownArgument:
        return
    assert translated(after.config) == Translation(after.config)
    for name, step in legacy.steps():
        kept = getattr(after.config, name).args.items()
        told = [
            f"{name}.args.{key}" for key, value in step.args.items() if (key, value) not in kept
        ]
        assert [path for path in told if not any(path in note for note in after.notes)] == []
