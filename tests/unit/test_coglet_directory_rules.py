"""What is removed below Cog's directory, and who may not have it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cog_triton.doctor import hardware
from cog_triton.doctor.check_result import State
from cog_triton.errors import TritonStartFailed
from cog_triton.serving.coglet import prediction_directory

OTHER_USER = Path(__file__).parents[1] / "other_user.py"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "coglet"
    monkeypatch.setattr(prediction_directory, "PLACE", place)
    return place


def make(place: Path, name: str) -> Path:
    directory = place / "predictions" / name
    for part in ("inputs", "outputs"):
        (directory / part).mkdir(parents=True)
    return directory


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "/tmp", "one/.."])
def test_only_a_prediction_of_that_name_is_removed(place: Path, name: str) -> None:
    make(place, "one")
    (place / "other").mkdir()
    prediction_directory.remove(name)
    assert (place / "predictions" / "one" / "outputs").is_dir()
    assert (place / "other").is_dir()
    prediction_directory.remove("one")
    assert list((place / "predictions").iterdir()) == []
    prediction_directory.remove("one")


def test_files_that_coglet_has_yet_to_read_are_kept(place: Path) -> None:
    (make(place, "one") / "outputs" / "spilled").touch()
    prediction_directory.remove("one")
    assert (place / "predictions" / "one" / "outputs" / "spilled").is_file()


def test_a_start_removes_what_a_killed_server_left(place: Path) -> None:
    old, new = make(place, "old"), make(place, "new")
    past = time.time() - 7200
    os.utime(old, (past, past))
    prediction_directory._sweep()
    assert not old.exists()
    assert (new / "outputs").is_dir()


@pytest.mark.parametrize("kind", ["file", "link", "part"])
def test_what_is_no_directory_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(prediction_directory, "namespace_refusal", lambda: "no namespaces")
    if kind == "file":
        place.touch()
    elif kind == "link":
        place.symlink_to(tmp_path)
    else:
        place.mkdir()
        (place / "output").touch()
    with pytest.raises(TritonStartFailed, match=r"is no directory.*\(no namespaces\)"):
        prediction_directory.require_usable()
    found = hardware.predictions()
    assert found.state is State.FAIL
    assert "user namespaces" in found.advice
    monkeypatch.setattr(prediction_directory, "namespace_refusal", lambda: None)
    prediction_directory.require_usable()
    assert hardware.predictions().state is State.OK


def test_a_directory_of_ones_own_may_be_shared(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_directory, "namespace_refusal", lambda: "no namespaces")
    prediction_directory.require_usable()
    assert not place.exists()
    make(place, "one")
    prediction_directory.require_usable()
    assert hardware.predictions().found.endswith(f"share {place}: no namespaces")


def test_why_there_is_no_namespace_is_told() -> None:
    command = [sys.executable, "-m", "cog_triton.serving.coglet.prediction_directory"]
    refusing = [sys.executable, str(OTHER_USER), "--no-namespaces", str(os.geteuid()), *command]
    done = subprocess.run(refusing, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "unshare: Operation not permitted")
