"""An engine directory finds its family, or an error that says what it holds instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_openvino_family import engine

from cog_triton.engines.base import EngineFamily
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.engines.registry import FAMILIES, open_engine
from cog_triton.errors import EngineCorrupt, ModelUnavailable


def test_families_have_names_of_their_own() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert all(issubclass(family, EngineFamily) for family in FAMILIES)


def test_an_openvino_engine(tmp_path: Path) -> None:
    family = open_engine(engine(tmp_path))
    assert isinstance(family, OpenVINOFamily)
    assert family.directory == tmp_path


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no-such"):
        open_engine(tmp_path / "no-such")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "engine.tar").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=r"engine\.tar"):
        open_engine(tmp_path / "engine.tar")


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(EngineCorrupt, match=r"openvino.*it holds nothing"):
        open_engine(tmp_path)


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"file{number:02}").touch()
    with pytest.raises(EngineCorrupt, match="file00, file01") as caught:
        open_engine(tmp_path)
    assert "file20" not in caught.value.detail


def test_an_engine_that_is_damaged(tmp_path: Path) -> None:
    (engine(tmp_path) / "config.json").write_text("{")
    with pytest.raises(EngineCorrupt, match=r"config\.json"):
        open_engine(tmp_path)
