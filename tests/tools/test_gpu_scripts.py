"""setup-gpu, verify-gpu and pack-gpu refuse wrong arguments before doing anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(directory: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In `directory`, whose programs come first."""
    python = [sys.executable] if script == "pack-gpu" else []
    return subprocess.run(
        [*python, str(SCRIPTS / script), *arguments],
        cwd=directory,
        env={"PATH": f"{directory}:/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "--phase=bench,pruen",
            "'pruen': must be of machine, checks, bench, bench-python, 1b, small",
        ),
        ("--concurrency=0", "'0': must be a whole number, at least 1"),
        ("--concurrency=1,x", "'x': must be a whole number"),
        ("--concurrency=1025", "1025: must be at most 1024"),
        ("--rounds=-1", "'-1': must be a whole number, at least 1"),
        ("--budget=nan", "'nan': must be seconds"),
        ("--argument=foo", "'foo': must be NAME=VALUE"),
        ("--engine-python=nowhere", "nowhere: no such program"),
        ("--root=file/x", "file/x: cannot be written to"),
        ("--reh", "unrecognized arguments: --reh"),
    ],
)
def test_verify_gpu_refuses_wrong_arguments(tmp_path: Path, arguments: str, told: str) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path, "verify-gpu", *arguments.split())
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_gpu_refuses_a_machine_without_gpu(tmp_path: Path) -> None:
    nothing = tmp_path / "nvidia-smi"
    nothing.write_text("#!/bin/sh\nexit 9\n")
    nothing.chmod(0o755)
    done = run(tmp_path, "verify-gpu", "--root", "gpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nvidia-smi shows no GPU here; without one: --rehearse" in done.stderr
    assert not (tmp_path / "gpu").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--foo", "--foo: no such option; see --help"),
        ("--kit", "--kit: needs a value"),
        ("--kit nowhere", "--kit nowhere: no kit of scripts/pack-gpu"),
        ("one two", "two: one DIRECTORY is enough"),
    ],
)
def test_setup_gpu_refuses_wrong_arguments(tmp_path: Path, arguments: str, told: str) -> None:
    done = run(tmp_path, "setup-gpu", *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["setup-gpu", "verify-gpu"])
def test_help_works_without_set_up(tmp_path: Path, script: str) -> None:
    done = run(tmp_path, script, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: scripts/{script}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (".", "is or has other files, which would be deleted"),
        ("mine", "is or has other files, which would be deleted"),
        ("kit --part-size 0", "--part-size 0: must be at least 1"),
        ("kit --python nowhere", "--python nowhere: no bin/python3.12"),
    ],
)
def test_pack_gpu_deletes_no_foreign_files(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, arguments: str, told: str
) -> None:
    (tmp_path / "mine").touch()
    prefix = tmp_path_factory.mktemp("python")
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python3.12").touch()
    done = run(tmp_path, "pack-gpu", f"--python={prefix}", *arguments.split())
    assert done.returncode == 2
    assert told in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
