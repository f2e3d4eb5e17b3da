"""An image for one GPU architecture refuses every other in one line, before it loads anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton import preflight
from cog_triton.errors import EngineIncompatible


@pytest.mark.parametrize("image_sm", [None, "", "cpu"])
def test_an_image_for_any_machine_asks_nothing(image_sm: str | None) -> None:
    def read() -> list[int]:
        raise AssertionError("asked")

    preflight.require_gpu(image_sm, read)


@pytest.mark.parametrize("found", [[86], [86, 86]])
def test_the_right_gpu(found: list[int]) -> None:
    preflight.require_gpu("86", lambda: found)


@pytest.mark.parametrize(("found", "others"), [([90], "sm_90"), ([86, 89], "sm_89")])
def test_another_gpu(found: list[int], others: str) -> None:
    with pytest.raises(EngineIncompatible) as caught:
        preflight.require_gpu("86", lambda: found)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(
        f"E1305 EngineIncompatible: this image is for sm_86, this GPU is {others}:"
    )
    assert others.replace("sm_", "cog-triton-runner-") in str(caught.value)


def test_no_gpu() -> None:
    with pytest.raises(EngineIncompatible, match="no GPU here: start it with `docker run --gpus"):
        preflight.require_gpu("90", list)


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(preflight.ctypes, "CDLL", missing)
    assert preflight.visible_gpus() == preflight.gpu_names() == []


def test_serve_says_it_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cog_triton", "serve", str(tmp_path)],
        # sm_1 is no GPU's, so the image is the wrong one on every machine.
        env={"COG_TRITON_SM": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        cwd=Path(preflight.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: E1305 EngineIncompatible: this image is for sm_1")
    assert len(done.stderr.splitlines()) == 1
