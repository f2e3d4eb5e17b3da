"""scripts/bump.py: what breaks is told by hook and file, and what could not be done by name."""

from __future__ import annotations

import importlib.metadata
import json
import runpy
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
DOUBLES = ROOT / "tests" / "doubles"
HERE = importlib.metadata.version("cog")
COGLET = "cog_triton/serving/coglet"
RECORDS = ROOT / "cog_triton" / "engines" / "vllm"


@pytest.fixture
def bump(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / "bump.py"))


@pytest.fixture
def hooks() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / "bump_hooks.py"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Sources of a vLLM: the double, which has the recorded names."""
    shutil.copytree(DOUBLES / "vllm", tmp_path / "site" / "vllm")
    return tmp_path / "site"


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def broken(rows: list[Any]) -> list[Any]:
    return [row for row in rows if row.outcome == "BROKE"]


def test_every_hook_holds_on_the_recorded_names(hooks: dict[str, Any], site: Path) -> None:
    rows = hooks["vllm_hooks"](site, ROOT)
    assert broken(rows) == []
    assert "cog_triton/engines/vllm/engine_api.py" in {row.file for row in rows}
    assert "StepOutputs" in rows[-1].name


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("processor.update_scheduler_stats", "processor.update_stats",
         "_run_output_handler does not call update_scheduler_stats"),
        ("class AsyncLLM", "class AsyncEngine", "has no class AsyncLLM"),
        ("async def add_request(", "async def submit(", "add_request"),
    ],
)  # fmt: skip
def test_an_output_handler_that_works_otherwise_is_told(
    hooks: dict[str, Any], site: Path, old: str, new: str, told: str
) -> None:
    path = site / "vllm" / "v1" / "engine" / "async_llm.py"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    found = broken(hooks["vllm_hooks"](site, ROOT))
    assert told in found[-1].advice
    assert found[-1].file == "cog_triton/engines/vllm/engine_api.py"


def test_a_name_or_a_module_that_is_gone_is_told_with_its_line(
    hooks: dict[str, Any], site: Path
) -> None:
    replace(site / "vllm" / "pooling_params.py", "class PoolingParams", "class PoolParams")
    shutil.rmtree(site / "vllm" / "lora")
    (row,) = broken(hooks["vllm_hooks"](site, ROOT))
    lines = (RECORDS / "engine_api.py").read_text("utf-8").splitlines()
    for name in ("from vllm.pooling_params import", "from vllm.lora.request import"):
        (line,) = [number for number, text in enumerate(lines, 1) if name in text]
        assert f"line {line}: vllm." in row.advice


def test_changes_of_the_interface_are_listed(hooks: dict[str, Any]) -> None:
    new = (RECORDS / "argument_types_0_33.json").read_text("utf-8")
    old = json.loads(new)
    del old["exceptions"]["vllm.exceptions:VLLMValidationError"]
    generate = "vllm.v1.engine.async_llm:AsyncLLM.generate"
    old["signatures"][generate].remove("kv_hints=")
    changes = hooks["interface_changes"]
    assert changes(new, new) == []
    one, two = changes(json.dumps(old), new)
    assert one == "- exceptions, new: vllm.exceptions:VLLMValidationError"
    assert f"- signatures, {generate}: `" in two
    assert "kv_hints" in two


def test_every_hook_is_found_with_its_tests_and_advice(hooks: dict[str, Any]) -> None:
    for patterns in hooks["_USERS"].values():
        assert [one for one in patterns if not list(ROOT.glob(one))] == []
    found = {hook.file: hook for hook in hooks["hooks_of"]("cog", ROOT)}
    assert [hook.file for hook in found.values() if not hook.tests] == []
    streams = found["cog_triton/serving/coglet/streaming.py"]
    assert streams.advice == "Delete when coglet streams generators."


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "which one?"),
        (["--cog", "newest"], "COG=newest: is neither a version nor a wheel"),
        (["--cog", "absent-1-py3-none-any.whl"], "there is no such wheel"),
        (["--cog", "{}/other-1-py3-none-any.whl"], "is a wheel of other; COG is cog"),
        (["--cog", "9" * 5000], "is neither a version nor a wheel"),
        (["--vllm", "{}/vllm-1-py3-none-any.whl"], "is no whole wheel"),
        (["--cog", "{}/cog-1-py3-none-any.whl"], "no coglet-1-*.whl lies beside it"),
        (["--cog", "{}/cog.whl"], "Invalid wheel filename"),
    ],
)
def test_what_cannot_be_bumped_is_refused(
    bump: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    arguments: list[str], told: str,
) -> None:  # fmt: skip
    for name in ("other-1-py3-none-any.whl", "vllm-1-py3-none-any.whl", "cog.whl"):
        (tmp_path / name).touch()
    with zipfile.ZipFile(tmp_path / "cog-1-py3-none-any.whl", "w"):
        pass
    assert bump["main"]([one.format(tmp_path) for one in arguments], tmp_path) == 2
    assert told in capsys.readouterr().err


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout with a workaround of Cog, and its test, which holds."""
    files = {
        "pyproject.toml": '[project]\ndependencies = [\n  "cog==0.1.0",\n  "coglet==0.1.0",\n]\n',
        "requirements/serve.in": "nvidia-pytriton==0.1.0\n",
        "requirements/vllm.in": "nvidia-pytriton==0.1.0\nvllm==0.33.0\n",
        "docs/a.md": "with Cog 0.1.0\n",
        f"{COGLET}/trick.py": '"""Workaround: a trick.\n\nDelete when it\nis gone."""',
        "tests/unit/test_trick.py": "# from cog_triton.serving.coglet import trick\n"
        "import pathlib\ndef test_trick():\n    assert not pathlib.Path('broken').exists()\n",
    }
    for name, text in files.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "checkout")], check=True)
    subprocess.run(["git", "add", "--all"], cwd=tmp_path / "checkout", check=True)
    return tmp_path / "checkout"


def test_offline_says_what_was_not_done_and_does_the_rest(
    bump: dict[str, Any], checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bump["main"](["--cog", "0.2.0", "--vllm", "0.34.0", "--offline"], checkout) == 3
    assert '  "cog==0.2.0",\n  "coglet==0.2.0",\n' in (checkout / "pyproject.toml").read_text()
    assert "vllm==0.34.0" in (checkout / "requirements" / "vllm.in").read_text()
    report = (checkout / ".work" / "bump" / "report.md").read_text()
    assert report in capsys.readouterr().out
    for line in (
        "# Bump: vllm 0.33.0 to 0.34.0, cog 0.1.0 to 0.2.0",
        "| locks | requirements/*.lock | --offline: run `make lock` later |",
        "| vLLM's interface |  | --offline: give its wheel, VLLM=FILE.whl |",
        f"| Workaround: a trick. | {COGLET}/trick.py | holds with {HERE}, which is installed:",
        "- `docs/a.md:1:with Cog 0.1.0`",
    ):
        assert line in report, report


def test_a_hook_holds_where_the_version_is_installed(bump: dict[str, Any], checkout: Path) -> None:
    assert bump["main"](["--cog", HERE, "--offline"], checkout) == 3
    report = (checkout / ".work" / "bump" / "report.md").read_text()
    assert f"| Workaround: a trick. | {COGLET}/trick.py | holds |" in report


def test_a_hook_that_breaks_is_told_with_its_test_and_what_to_do(
    bump: dict[str, Any], checkout: Path
) -> None:
    (checkout / "broken").touch()
    assert bump["main"](["--cog", "0.2.0", "--offline"], checkout) == 1
    report = (checkout / ".work" / "bump" / "report.md").read_text()
    assert "1 broke, 2 not done" in report
    (row,) = [line for line in report.split("## Broke")[1].splitlines() if "trick.py |" in line][:1]
    assert "tests/unit/test_trick.py::test_trick" in row
    assert "Delete when it is gone." in row


def test_a_step_that_fails_is_not_the_end(bump: dict[str, Any], checkout: Path) -> None:
    for name, text in {"lock": "echo no network >&2; exit 1", "setup": "exit 0"}.items():
        (checkout / "scripts").mkdir(exist_ok=True)
        (checkout / "scripts" / name).write_text(f"#!/bin/sh\n{text}\n")
        (checkout / "scripts" / name).chmod(0o755)
    assert bump["main"](["--cog", "0.2.0"], checkout) == 3
    report = (checkout / ".work" / "bump" / "report.md").read_text()
    assert "| locks | requirements/*.lock | no network |" in report
    assert "| .venv |  | holds |" in report
    replace(checkout / "pyproject.toml", '  "cog==0.2.0",\n', "")
    assert bump["main"](["--cog", "0.3.0"], checkout) == 1
    assert (
        "0 pins of cog, which needs one" in (checkout / ".work" / "bump" / "report.md").read_text()
    )
