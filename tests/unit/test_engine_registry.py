"""Engine registry: finds the family of an engine directory, or says what the directory holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from cog_triton.engines.registry import open_engine
from cog_triton.errors import EngineCorrupt, ModelUnavailable


@pytest.mark.parametrize("name", ["no-such", "engine.tar"])
def test_what_is_no_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "engine.tar").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=name):
        open_engine(tmp_path / name)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineCorrupt, match=r"openvino.*it holds nothing"):
        open_engine(tmp_path)


def test_an_unknown_directory_is_refused_with_its_content(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"file{number:02}").touch()
    with pytest.raises(EngineCorrupt, match="file00, file01") as caught:
        open_engine(tmp_path)
    assert "file20" not in caught.value.detail
