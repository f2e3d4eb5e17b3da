"""Resumption: the request that goes on, and each promise against what is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.base import EngineFamily, EngineLimits
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.engines.request import EngineRequest, resumed_seed
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.errors import FatalRequest
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.serving.generation import GenerationRequest
from cog_triton.serving.quarantine import QUARANTINE_S, Quarantine
from cog_triton.serving.resume import Obstacle, continuation
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import DrawnSeed, SamplingParams, resolve_seed

FAMILIES: tuple[type[EngineFamily], ...] = (
    VLLMFamily,
    VLLMFamily,
    TensorRTLLMFamily,
    OpenVINOFamily,
    MockFamily,
)
"""In the order of the columns; the first is asked, and takes output."""
PAGE = Path(__file__).parents[2] / "docs" / "supervision.md"
TABLE = PAGE.read_text("utf-8").partition("What is promised:\n\n| | ")[2].partition("\n\n")[0]
NAMES, _, *ROWS = ([cell.strip() for cell in row.split("|")] for row in TABLE.splitlines())
PROMISES = {asked: row for _, asked, *row, _ in ROWS}
LIMITS = EngineLimits(max_input_len=20, max_seq_len=100, max_batch_size=4, end_id=None, pad_id=None)
MADE = [7, 8, 7]


def resumed(
    made: list[int] = MADE,
    family: type[EngineFamily] = TensorRTLLMFamily,
    told: bool = False,
    fields: dict[str, Any] | None = None,
    imports: bool = False,
    **sampling: Any,
) -> EngineRequest | Obstacle:
    given = SamplingParams(**{"max_tokens": 10, "seed": 5, **sampling})
    request = EngineRequest(input_ids=[1, 2], sampling=given, **fields or {})
    rules = family.resume_rules
    return continuation(request, made, rules, LIMITS, prompt_told=told, imports=imports)


def request(found: EngineRequest | Obstacle) -> EngineRequest:
    assert isinstance(found, EngineRequest), found
    return found


def test_what_was_made_is_prompt_and_counts() -> None:
    found = request(resumed(min_tokens=5))
    assert found.input_ids == [1, 2, *MADE]
    assert (found.sampling.max_tokens, found.sampling.min_tokens, found.made) == (7, 2, ())
    assert request(resumed(min_tokens=1)).sampling.min_tokens == 0


@pytest.mark.parametrize("family", [MockFamily, OpenVINOFamily])
def test_what_was_made_is_output_where_the_engine_takes_it(family: type[EngineFamily]) -> None:
    found = request(resumed(family=family, min_tokens=5))
    assert (found.input_ids, found.made) == ([1, 2], (7, 8, 7))
    assert (found.sampling.max_tokens, found.sampling.min_tokens) == (10, 5)


def test_nothing_made_begins_anew() -> None:
    found = request(resumed([], fields={"guide": Guide("regex", "a"), "prompt_log_probs": True}))
    assert found.input_ids == [1, 2]
    assert (found.sampling.seed, found.sampling.max_tokens, found.made) == (5, 10, ())
    assert found.prompt_log_probs


def test_the_seed_differs_from_offset_to_offset_and_is_reproducible() -> None:
    seeds = [resumed_seed(5, made) for made in range(1, 100)]
    assert len({5, *seeds}) == 100
    assert all(0 <= seed < 2**63 for seed in [*seeds, resumed_seed(2**64 - 1, 10**6)])
    assert request(resumed()).sampling.seed == resumed_seed(5, 3)


def test_log_probs_of_the_prompt_are_told_once() -> None:
    fields = {"return_log_probs": True, "prompt_log_probs": True, "top_log_probs": 2}
    found = request(resumed(told=True, fields=fields))
    assert (found.return_log_probs, found.top_log_probs) == (True, 2)
    assert not found.prompt_log_probs
    assert not request(resumed([], told=True, fields=fields)).prompt_log_probs


def test_a_guide_ends_it_once_there_is_a_token() -> None:
    found = resumed(fields={"guide": Guide("regex", "a")})
    assert isinstance(found, Obstacle)
    assert found.parameter == "guide"


def test_frequency_penalty_is_a_bias_with_vllm_that_takes_no_output() -> None:
    found = request(resumed(family=VLLMFamily, frequency_penalty=0.5, logit_bias={8: 1.0, 9: 2.0}))
    assert found.sampling.logit_bias == {7: -1.0, 8: 0.5, 9: 2.0}
    assert found.sampling.frequency_penalty == 0.5
    for more in ({"repetition_penalty": 1.1}, {"logit_bias": {7: -99.5}}):
        found = resumed(family=VLLMFamily, frequency_penalty=0.5, **more)
        assert isinstance(found, Obstacle)
        assert found.parameter == "frequency_penalty"
    many = resumed(list(range(1025)), VLLMFamily, frequency_penalty=0.5, max_tokens=2000)
    assert isinstance(many, Obstacle)


DRAWS = {"temperature": 0.8, "top_p": 0.9}
GUIDE = Guide("json_schema", "{}")
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "a `seed` that was given": DRAWS,
    "a random seed": {**DRAWS, "seed": resolve_seed(None)},
    "`repetition_penalty`": {"repetition_penalty": 1.5},
    "`frequency_penalty`": {"frequency_penalty": 0.5},
    "`presence_penalty`": {"presence_penalty": 0.5},
    "`min_tokens`": {"min_tokens": 8},
    "`logit_bias`": {"logit_bias": {3: 1.0}},
    "JSON schema": {"fields": {"guide": GUIDE}},
    "regex": {"fields": {"guide": Guide("regex", "a")}},
    "grammar": {"fields": {"guide": Guide("grammar", "root ::= 'a'")}},
    "forced tool": {"fields": {"guide": GUIDE}},
    "`tools: auto`, calls guided": {"fields": {"guide": Guide("structural_tag", "{}")}},
    "reasoning": {},
    "`n` > 1": {},
    "log probabilities": {"fields": {"return_log_probs": True}},
    "LoRA adapter": {"fields": {"adapter": "sql"}},
    "images": {"fields": {"images": (ImagePart("messages[0]", b"a"),)}},
    "more than `max_input_len`": {"made": [3] * 19, "max_tokens": 50},
}


@pytest.mark.parametrize("column", range(len(FAMILIES)), ids=NAMES[:-1])
@pytest.mark.parametrize("asked", ASKED)
def test_a_promise_is_kept(asked: str, column: int) -> None:
    family, promised = FAMILIES[column], PROMISES[asked][column]
    found = resumed(family=family, imports=column == 0, **ASKED[asked])
    ends = promised.startswith("E2105")
    if promised == "-":
        return
    assert isinstance(found, Obstacle) is ends
    if isinstance(found, Obstacle):
        return
    changed = found.sampling.seed not in (5, ASKED[asked].get("seed"))
    replayed = not found.made and list(found.input_ids) == [1, 2]
    if promised == "whole, redrawn" and asked != "a random seed":
        assert changed
    elif column == 0:
        assert found.made
        assert not changed
    elif promised == "exact":
        # Greedy tokens follow from those before; what else counts them is made again.
        assert replayed or family is MockFamily or asked in PLAIN


PLAIN = [asked for asked, row in PROMISES.items() if row == PROMISES["greedy"]]
PLAIN.append("more than `max_input_len`")


def test_every_class_is_asked_and_told_by_all_families() -> None:
    assert all(len(row) == len(FAMILIES) for row in PROMISES.values())
    interfaces = [name for name in PROMISES if name not in ASKED]
    assert [name.startswith(("`/v1", "`generate")) for name in interfaces] == [True, True]


def test_a_seed_that_was_drawn_stays_one() -> None:
    assert isinstance(resolve_seed(-1), DrawnSeed)
    assert not isinstance(resolve_seed(7), DrawnSeed)
    made = resumed(family=OpenVINOFamily, seed=resolve_seed(None), **DRAWS)
    assert request(made).made == (7, 8, 7)
    assert request(resumed(family=OpenVINOFamily, **DRAWS)).made == ()


def prompt(*ids: int, **fields: Any) -> GenerationRequest:
    engine = EngineRequest(input_ids=ids, sampling=SamplingParams(max_tokens=1), **fields)
    return GenerationRequest(engine=engine)


def test_quarantine_refuses_a_prompt_for_a_while() -> None:
    now = 0.0
    held = Quarantine(lambda: now)
    held.add(prompt(1, 2))
    with pytest.raises(FatalRequest, match="for another 600 s"):
        held.check(prompt(1, 2))
    others = ({"adapter": "sql"}, {"images": (ImagePart("messages[0]", b"a"),)})
    for other in (prompt(1), prompt(1, 2, 3), *(prompt(1, 2, **values) for values in others)):
        held.check(other)
    now = QUARANTINE_S
    held.check(prompt(1, 2))
    held.add(prompt(3))
    assert len(held._until) == 1


def test_rules_are_conservative_where_a_family_says_nothing() -> None:
    rules = replace(EngineFamily.resume_rules)
    assert rules.frequency_penalty is None
    assert rules.presence_penalty is None
    assert (rules.imports, rules.replays) == ("never", False)
