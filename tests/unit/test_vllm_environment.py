"""vLLM's environment: the plan, and the making of it by a stand-in of uv with a tiny lock."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from command_line import ran

from cog_triton.errors import MissingExtra
from cog_triton.packages import package_set
from cog_triton.packages.vllm_environment import VLLMEnvironment

HASH = "0" * 64
# Makes an environment of our own Python, and packages that are their metadata alone.
UV = f"""#!{sys.executable}
import pathlib, re, sys, venv
words = sys.argv[1:]
log = pathlib.Path(__file__).with_name("log")
log.write_text((log.read_text() if log.exists() else "") + " ".join(words[:2]) + "\\n")
if words[0] == "venv":
    venv.create(next(word for word in words if word.startswith("/")), symlinks=True)
else:
    if pathlib.Path(__file__).with_name("broken").exists():
        sys.exit("error: no network")
    lib = pathlib.Path(words[words.index("--python") + 1]).parents[1] / "lib"
    (site,) = lib.glob("python3*/site-packages")
    text = pathlib.Path(words[words.index("-r") + 1]).read_text()
    for name, version in re.findall(r"^(\\S+)==(\\S+)", text, re.M):
        info = site / f"{{name}}-{{version}}.dist-info"
        info.mkdir(exist_ok=True)
        info.joinpath("METADATA").write_text(f"Name: {{name}}\\nVersion: {{version}}\\n")
"""


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a stand-in of uv: `log` has its commands; a file `broken` breaks it."""
    directory = tmp_path / "uv"
    directory.mkdir()
    (directory / "uv").write_text(UV)
    (directory / "uv").chmod(0o755)
    monkeypatch.setenv("UV", str(directory / "uv"))
    monkeypatch.setenv("COG_TRITON_WORK_DIR", str(tmp_path / "work"))
    return directory


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.lock"
    path.write_text(f"vllm==0.33.0 \\\n    --hash=sha256:{HASH}\n")
    return path


def setup(*options: str) -> tuple[int, str]:
    result = ran("setup", "vllm", *options, columns=300)
    return result.exit_code, result.output


def commands(uv: Path) -> list[str]:
    log = uv / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_the_plan_of_the_packages_own_lock(uv: Path, tmp_path: Path) -> None:
    code, output = setup("--dry-run")
    assert code == 0
    assert "requirements/vllm.lock (177 packages)" in output
    assert f"makes     {tmp_path}/work/vllm/" in output
    assert "venv --allow-existing --python 3.12" in output
    assert "--no-deps --require-hashes --only-binary :all:" in output
    assert commands(uv) == []
    assert not (tmp_path / "work").exists()


def test_it_is_made_once_and_found(uv: Path, lock: Path, tmp_path: Path) -> None:
    code, output = setup("--without-gpu", "--lock", str(lock))
    assert code == 0, output
    assert "vllm is ready: " in output
    assert commands(uv) == ["venv --allow-existing", "pip install"]
    environment = VLLMEnvironment.of(tmp_path / "work", lock)
    assert environment.ready
    assert setup("--without-gpu", "--lock", str(lock))[0] == 0
    assert len(commands(uv)) == 2
    assert "(ready)" in setup("--dry-run", "--lock", str(lock))[1]
    lock.write_text(lock.read_text().replace("0.33.0", "0.33.1"))
    assert not VLLMEnvironment.of(tmp_path / "work", lock).ready


def test_a_failure_is_told_and_the_next_attempt_goes_on(uv: Path, lock: Path) -> None:
    (uv / "broken").touch()
    code, output = setup("--without-gpu", "--lock", str(lock))
    assert code == 1
    assert "E1304 ModelUnavailable: vLLM's environment cannot be fetched (exit code 1)" in output
    assert "error: no network" in output
    (uv / "broken").unlink()
    assert setup("--without-gpu", "--lock", str(lock))[0] == 0


def test_without_a_gpu_or_uv_nothing_is_made(
    uv: Path, lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.system.gpus.visible_gpus", list)
    code, output = setup("--lock", str(lock))
    assert (code, commands(uv)) == (1, [])
    assert "no NVIDIA GPU that CUDA can see" in output
    assert "no such file" in setup("--lock", "absent.lock")[1]
    monkeypatch.delenv("UV")
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(package_set.sys, "executable", "/none/python")
    monkeypatch.setattr("cog_triton.packages.package_set._lacking", lambda _set: ["uv"])
    monkeypatch.setattr(package_set.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtra, match="uv is to be fetched, and neither uv nor pip is here"):
        VLLMEnvironment.of(tmp_path / "work", lock).make(lambda _line: None)
