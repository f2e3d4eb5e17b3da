"""Build refusals before anything runs: unwritable places and missing programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_builds import build_engine, config_of
from sample_builds import examples as examples  # a fixture

from cog_triton.builder.plan import Families, make_plan
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import InvalidArgument, UnknownExample


@pytest.mark.parametrize("place", ["file", "file/below", "loop", "loop/below"])
def test_impossible_work_directory_is_refused(tmp_path: Path, examples: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidArgument, match=f"work_dir {tmp_path / place}: "):
        build_engine(config_of(tmp_path), Workspace(tmp_path / place), tmp_path / "e.tar", examples)


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
        build_engine(config_of(tmp_path), Workspace(tmp_path / "work"), tmp_path / output, examples)
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
        make_plan(config_of(tmp_path), Families(examples))
