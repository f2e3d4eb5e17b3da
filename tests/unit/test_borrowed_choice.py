"""Choice of vLLM's parsers: by the settings, or by the type of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from openai_server import TOKENIZER
from vllm_engines import double_environment

from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai.parsers.borrowed import borrow
from cog_triton.settings import load_settings
from cog_triton.text.tokenizer import EngineTokenizer


@dataclass
class Family:
    tokenizer_dir: Path
    parses = True

    @property
    def model_dir(self) -> Path:
        return self.tokenizer_dir


UNKNOWN, PYTHONIC = "<arg_key>", "[func_name1(a=1)]"
BORROWED: list[tuple[dict[str, str], str, str, tuple[str, str] | None]] = [
    ({"tool_call_parser": "vllm:brackets"}, UNKNOWN, "qwen3", ("brackets", "")),
    ({"tool_call_parser": "vllm:glm45"}, UNKNOWN, "qwen3", ("glm45", "glm45")),
    (
        {"tool_call_parser": "vllm:auto", "reasoning_parser": "none"},
        UNKNOWN,
        "glm4_moe",
        ("glm45", ""),
    ),
    ({"reasoning_parser": "vllm:braces"}, UNKNOWN, "qwen3", ("", "braces")),
    ({}, UNKNOWN, "glm4_moe", ("glm45", "glm45")),
    ({}, UNKNOWN, "qwen3", None),
    ({}, PYTHONIC, "llama", ("pythonic", "")),
    ({}, PYTHONIC, "glm4_moe", ("glm45", "glm45")),
    ({"tool_call_parser": "none"}, UNKNOWN, "glm4_moe", None),
]


def tokenizer(mark: str) -> EngineTokenizer:
    return replace(TOKENIZER, chat_template="{{ tools }}" + mark)


@contextmanager
def served_model(directory: Path, model_type: str) -> Iterator[Any]:
    TOKENIZER.tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in double_environment().items():
            patch.setenv(name, value)
        yield Family(directory)


@pytest.mark.parametrize(("options", "mark", "model_type", "expected"), BORROWED)
def test_settings_template_and_the_models_type_choose(
    tmp_path: Path,
    options: dict[str, str],
    mark: str,
    model_type: str,
    expected: tuple[str, str] | None,
) -> None:
    with served_model(tmp_path, model_type) as family:
        made = borrow(load_settings(**options), family, tokenizer(mark), tmp_path / "links")
    assert (made and (made.tool, made.reasoning)) == expected
    if made is not None:
        made.close()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"tool_call_parser": "vllm:auto"}, "has no parser by the model's type 'qwen3'; name one"),
        ({"tool_call_parser": "vllm:none_such"}, "has no tool call parser 'none_such'"),
        (
            {"tool_call_parser": "vllm:brackets", "reasoning_parser": "think"},
            "REASONING_PARSER=think: not beside TOOL_CALL_PARSER=vllm:brackets",
        ),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    tmp_path: Path, options: dict[str, str], rule: str
) -> None:
    with (
        served_model(tmp_path, "qwen3") as family,
        pytest.raises(InvalidArgument, match=rule),
    ):
        borrow(load_settings(**options), family, tokenizer(UNKNOWN), tmp_path / "links")


@pytest.mark.parametrize("value", ["vllm:", "vllm:a b", "vllm/hermes", "qwen", "pythonic"])
def test_a_setting_is_a_name(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"TOOL_CALL_PARSER=.*must be auto, .* or vllm:NAME"):
        load_settings(tool_call_parser=value)
