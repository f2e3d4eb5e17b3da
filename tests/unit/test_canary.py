"""Canary of an engine: its file, its check at start, and where a build makes none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cog_triton.artifact import canary
from cog_triton.artifact.canary import CANARY_NAME, Canary
from cog_triton.builder.package import canary_of
from cog_triton.errors import CanaryFailed, EngineCorrupt, TritonTimeout
from cog_triton.serving.runtime import check_canary

KNOWN = Canary(input_ids=[5, 6], output_ids=[7, 8, 9])


class Answering:
    """Generator that answers with `ids`, or raises them."""

    def __init__(self, ids: list[int] | Exception) -> None:
        self._ids = ids
        self.asked: list[tuple[list[int], int]] = []

    async def greedy_ids(self, input_ids: Sequence[int], count: int) -> list[int]:
        self.asked.append((list(input_ids), count))
        if isinstance(self._ids, Exception):
            raise self._ids
        return self._ids


def check(directory: Path, generator: Answering, *, required: bool) -> None:
    family: Any = SimpleNamespace(directory=directory)
    asked: Any = generator
    asyncio.run(check_canary(family, asked, required=required))


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / CANARY_NAME).write_text(KNOWN.to_json())
    return tmp_path


def test_it_is_read_as_it_was_written(engine: Path) -> None:
    assert canary.load(engine) == KNOWN


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "canary.json: the document: "),
        ('{"input_ids":[1],"output_ids":[]}', "canary.json: output_ids: "),
        ('{"input_ids":[1],"output_ids":["a"]}', "canary.json: output_ids.0: 'a'"),
        ('{"input_ids":[1],"output_ids":[1],"more":1}', "canary.json: more: 1"),
    ],
)
def test_another_file_is_refused_by_key_and_value(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / CANARY_NAME).write_text(text)
    with pytest.raises(EngineCorrupt) as caught:
        canary.load(tmp_path)
    assert named in str(caught.value)


def test_an_engine_without_one_is_not_asked(tmp_path: Path) -> None:
    generator = Answering([])
    check(tmp_path, generator, required=True)
    assert generator.asked == []


def test_the_right_answer_passes(engine: Path) -> None:
    generator = Answering([7, 8, 9])
    check(engine, generator, required=True)
    assert generator.asked == [([5, 6], 3)]


@pytest.mark.parametrize(
    ("answer", "code"), [([7, 8, 1], "E2112"), ([7, 8], "E2112"), (TritonTimeout("late"), "E2101")]
)
def test_another_one_is_a_warning_unless_it_is_required(
    engine: Path, answer: Any, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check(engine, Answering(answer), required=False)
    assert code in caplog.text
    with pytest.raises((CanaryFailed, TritonTimeout), match=code):
        check(engine, Answering(answer), required=True)


def test_a_family_that_a_build_cannot_run_gets_none(tmp_path: Path) -> None:
    assert canary_of("tensorrt_llm", tmp_path, pytest.fail) is None


def test_an_engine_that_does_not_answer_gets_none_and_a_warning(tmp_path: Path) -> None:
    lines: list[str] = []
    assert canary_of("openvino", tmp_path, lines.append) is None
    (line,) = lines
    assert line.startswith("[engine] warning: no canary")
