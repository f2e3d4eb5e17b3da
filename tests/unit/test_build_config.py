"""Build configs: what is accepted, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.build.arguments import command_line
from cog_triton.build.config import BuildConfig, load_config, parse_config
from cog_triton.errors import BuildConfigInvalid

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "build").glob("*.yaml"))
GOOD = """
model_id: some/model
example_name: gpt
convert_to_ft:
  script: hf_gpt_convert.py
  output_dir: ./c-model/gpt2/1-gpu
  args:
    tensor-parallelism: 1
    storage-type: float16
build:
  script: build.py
  output_dir: ./engine_outputs/
  args:
    use_gpt_attention_plugin:
    remove_input_padding: false
"""


def test_the_seeds_config_is_understood() -> None:
    config = parse_config(GOOD, "x.yaml")
    assert [name for name, _ in config.steps()] == ["convert_to_ft", "build"]
    assert config.build.args == {"use_gpt_attention_plugin": None, "remove_input_padding": False}


def test_configs_of_the_repository_are_valid() -> None:
    assert CONFIGS
    for path in CONFIGS:
        assert load_config(path).build.output_dir


def test_written_config_reads_back_equal() -> None:
    config = parse_config(GOOD, "x.yaml")
    assert parse_config(config.to_yaml(), "again") == config


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("model_id:", "model:", "model_id is missing"),
        ("model_id:", "modelid:", "modelid: unknown key; did you mean 'model_id'?"),
        ("example_name: gpt", "example_name: ", "example_name: None"),
        ("example_name: gpt", "example_name: ../x", "example_name: '../x'"),
        ("some/model", "''", "model_id: ''"),
        ("some/model", "7", "model_id: 7"),
        ("script: build.py", "scripts: build.py", "build.scripts: unknown key; did you mean 'scr"),
        ("script: build.py", "", "build.script is missing"),
        ("script: build.py", "script: ../../bin/sh", "build.script: '../../bin/sh'"),
        ("script: build.py", "script: build.py\n  executable: bash", "build.executable: 'bash'"),
        ("./engine_outputs/", "/tmp", "build.output_dir: '/tmp': must be a relative path"),
        ("./engine_outputs/", "a/../..", "build.output_dir: 'a/../..': must be a relative"),
        ("./engine_outputs/", ".", "build.output_dir: '.': must be a relative"),
        ("use_gpt_attention_plugin:", "x: {a: 1}", "build.args.x: {'a': 1}: must be empty, true"),
        ("use_gpt_attention_plugin:", "x: 2024-01-01", "build.args.x: datetime.date"),
        ("use_gpt_attention_plugin:", "x: [true]", "build.args.x: "),
        ("use_gpt_attention_plugin:", "--x:", "must be written without dashes"),
        ("use_gpt_attention_plugin:", "7:", "build.args.7"),
        ("tensor-parallelism: 1", "a: {}", "convert_to_ft.args.a"),
        (
            "./engine_outputs/",
            "c-model/gpt2",
            "'c-model/gpt2' overlaps 'c-model/gpt2/1-gpu' of con",
        ),
        ("./engine_outputs/", "model/x", "build.output_dir 'model/x' overlaps 'model' of the bui"),
        ("use_gpt_attention_plugin:", 'x: "\\0"', "NUL"),
        ("build:", "build: 3\nquantize:", "build: 3"),
        ("build:", "convert: {script: a.py, output_dir: a}\nbuild:", "convert are one step"),
        ("build:", "biuld:", "biuld: unknown key; did you mean 'build'?"),
        ("storage-type: float16", "tensor-parallelism: 2", "is there twice"),
        ("args:", "args: [", "not valid YAML"),
        ("args:\n", "args: 3\n", "not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_path_value_and_rule(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(BuildConfigInvalid) as caught:
        parse_config(GOOD.replace(old, new), "x.yaml")
    assert str(caught.value).startswith("E1300 BuildConfigInvalid: x.yaml: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a", "7", "a: b: c", "\0"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(BuildConfigInvalid):
        parse_config(text, "x.yaml")


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(BuildConfigInvalid) as caught:
        parse_config("model_id: 7\nbuild: 3\n", "x.yaml")
    assert [part in str(caught.value) for part in ("model_id: 7", "example_name", "build: 3")] == [
        True
    ] * 3


def test_missing_file_is_coded(tmp_path: Path) -> None:
    with pytest.raises(BuildConfigInvalid, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_values_mean_one_thing_each() -> None:
    args = {"a": None, "b": True, "c": False, "d": 0, "e": "", "f": ["x", 2, ""], "g": 1e-05}
    words = ["--a", "--b", "--d", "0", "--e", "", "--f", "x", "2", "", "--g", "1e-05"]
    assert command_line(args) == words
    assert command_line({}) == []


def test_a_key_given_twice_is_refused_even_deep_down() -> None:
    with pytest.raises(BuildConfigInvalid, match="'script' is there twice"):
        parse_config(GOOD.replace("script: build.py", "script: a.py\n  script: build.py"), "x")


scalars = (
    st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
)
values = st.none() | st.booleans() | scalars | st.lists(scalars, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.from_regex(r"[A-Za-z][A-Za-z0-9_-]*", fullmatch=True), values))
def test_any_arguments_survive_yaml(args: dict[str, object]) -> None:
    step = {"script": "build.py", "output_dir": "engine", "args": args}
    value = {"model_id": "m", "example_name": "e", "build": step}
    text = yaml.safe_dump(value, sort_keys=False)
    config = parse_config(text, "x")
    assert isinstance(config, BuildConfig)
    assert command_line(config.build.args) == command_line(args)
    assert parse_config(config.to_yaml(), "again") == config
