"""Work directories that cannot be used end the start with a code and what to do."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import DiskFull, InvalidArgument
from cog_triton.serving.cog_process import CogServer
from cog_triton.serving.engine_preparation import prepare_engine
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports
from cog_triton.system.work_dir import require_usable, work_dir_errors
from cog_triton.triton import installation


def test_a_work_dir_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    require_usable(tmp_path / "a" / "größe")
    assert list((tmp_path / "a" / "größe").iterdir()) == []


@pytest.mark.parametrize("below", ["", "more"])
def test_a_file_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="must be a directory that can be written"):
        require_usable(tmp_path / "file" / below)


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="must be a directory that can be written"):
        require_usable(Path("/proc/nothing"))


def test_a_path_that_is_no_text_in_this_locale_is_refused() -> None:
    path = Path(os.fsdecode(b"/tmp/gr\xf6\xdfe"))
    with pytest.raises(InvalidArgument, match="not text in this locale"):
        require_usable(path)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="No space left"), work_dir_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_when_the_stub_is_copied_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(installation.shutil, "copy", full)  # type: ignore[attr-defined]
    settings = load_settings(cog_triton_work_dir=tmp_path, cog_triton_engine="mock")
    with pytest.raises(DiskFull, match="COG_TRITON_WORK_DIR"):
        asyncio.run(prepare_engine(settings))


def start(**settings: Any) -> None:
    ports = dict(zip(("openai_port", "triton_http_port"), free_ports(2), strict=True))
    server = CogServer(load_settings(**settings, **ports), "127.0.0.1", 5000, 16, verbose=False)
    server.run(lambda line: None)


def test_serve_refuses_it_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="COG_TRITON_WORK_DIR"):
        start(cog_triton_engine="mock", cog_triton_work_dir=tmp_path / "file")


def test_the_default_needs_one_place_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing/cache")
    with pytest.raises(InvalidArgument, match="COG_TRITON_WORK_DIR is unset"):
        _ = load_settings().work_dir
