"""The table of fields in docs/openai.md: it leaves out no field, and tells what engines can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cog_triton.engines.abilities import Abilities
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.serving.openai import requests

PAGE = (Path(__file__).parents[2] / "docs" / "openai.md").read_text("utf-8")
SECTION = PAGE.partition("## Fields\n")[2].partition("\n## ")[0]
ROWS = [line.split(" | ") for line in SECTION.splitlines() if line.startswith("| `")]
COLUMNS = {"openvino": 1, "mock": 4}


def test_every_field_is_in_the_section() -> None:
    known = {
        *requests.ChatRequest.model_fields,
        *requests.CompletionRequest.model_fields,
        *requests._NO_OP_VALUES,
        *requests._IGNORED_FIELDS,
    }
    assert known - set(re.findall(r"`(\w+)`", SECTION)) == set()


@pytest.mark.parametrize(
    ("family", "field", "able"),
    [
        ("openvino", "min_p", lambda found: "min_p" in found.sampling),
        ("openvino", "logit_bias", lambda found: "logit_bias" in found.sampling),
        ("openvino", "top_logprobs", lambda found: found.top_log_probs > 0),
        ("openvino", "guided_regex", lambda found: "regex" in found.guides),
        ("openvino", "guided_grammar", lambda found: "grammar" in found.guides),
        ("mock", "top_logprobs", lambda found: found.top_log_probs > 0),
        ("mock", "guided_regex", lambda found: "regex" in found.guides),
    ],
)
def test_what_is_refused_is_what_the_engine_cannot(family: str, field: str, able: object) -> None:
    abilities: dict[str, Abilities] = {
        "openvino": OpenVINOFamily.abilities.fget(object()),  # type: ignore[attr-defined]
        "mock": MockFamily.abilities,
    }
    row = next(row for row in ROWS if f"`{field}`" in row[0])
    assert callable(able)
    assert (row[COLUMNS[family]] != "refused") == bool(able(abilities[family]))
