"""Script of the mock's answers: who is told what, and scripts that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mock_requests import request
from tokenizers import Tokenizer

from cog_triton.engines.mock import mock_directory
from cog_triton.engines.mock.engine import MockEngine
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import InvalidArgument
from cog_triton.text.guide import Guide

SCRIPT = [
    {"after": "weather", "say": "<tool_call>{}</tool_call>"},
    {"after": "weather\n15", "say": "It is 15 °C."},
    {"after": "Thanks", "say": "You are welcome"},
]


def scripted(directory: Path, script: object = SCRIPT) -> Path:
    path = directory / "answers.json"
    path.write_text(script if isinstance(script, str) else json.dumps(script))
    return mock_directory.make_engine(directory / "engines", path)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("How is the weather?", SCRIPT[0]["say"]),
        ("How is the weather\n15", SCRIPT[1]["say"]),  # of two at one place, the longer
        ("weather\n15 ... Thanks, and of the weather tomorrow?", SCRIPT[0]["say"]),
        ("<|im_start|>user\nweather\n15 Thanks<|im_end|>", SCRIPT[2]["say"]),
    ],
)
def test_the_entry_that_comes_last_answers(tmp_path: Path, prompt: str, answer: str) -> None:
    engine = scripted(tmp_path)
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    mock = MockEngine(mock_directory.read_model(engine), MockOptions(tps=0))

    def rest() -> list[int]:
        events: list[TokenEvent] = []
        while not (events and events[-1].finish):
            events += [event for _, event in mock.step()]
        assert events[-1].finish == "stop"
        return [token for event in events for token in event.token_ids]

    ids = tokenizer.encode(prompt).ids
    whole = replace(request(100, guide=Guide("regex", ".*")), input_ids=ids)
    mock.submit(1, whole)
    said = rest()
    assert tokenizer.decode(said) == answer
    # Taken up after an engine's death: the same answer, although the prompt has grown by it.
    mock.submit(2, replace(whole, made=said[:2]))
    assert rest() == said[2:]


def test_without_an_entry_the_passage_answers_and_guides_need_a_script(tmp_path: Path) -> None:
    engine, plain = scripted(tmp_path), mock_directory.make_engine(tmp_path / "engines")
    model = mock_directory.read_model(engine)
    assert model.output_for([5, 6]) == model.output_ids
    assert "json_schema" in MockFamily.open(engine).abilities.guides
    assert not MockFamily.open(plain).abilities.guides


@pytest.mark.parametrize(
    "script", ["nonsense", "{}", [{"after": "a"}], [{"after": "", "say": "b"}], [1]]
)
def test_other_scripts_are_refused(tmp_path: Path, script: object) -> None:
    with pytest.raises(InvalidArgument, match=r"MOCK_ANSWERS=.*answers.json.*must be a list"):
        scripted(tmp_path, script)


def test_an_absent_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"MOCK_ANSWERS=.*absent.*must be a list"):
        mock_directory.make_engine(tmp_path, tmp_path / "absent")
