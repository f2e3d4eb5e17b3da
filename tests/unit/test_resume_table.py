"""Resumption: the request that goes on, parameter by family, and what cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cog_triton.engines.base import EngineFamily, EngineLimits
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.errors import FatalRequest
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.serving import generate
from cog_triton.serving.generate import Quarantine
from cog_triton.serving.generation import GenerationRequest
from cog_triton.serving.resume import Obstacle, continuation, parameters, resumed_seed
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams

FAMILIES: tuple[type[EngineFamily], ...] = (
    MockFamily,
    OpenVINOFamily,
    VLLMFamily,
    TensorRTLLMFamily,
)
LIMITS = EngineLimits(max_input_len=20, max_seq_len=100, max_batch_size=4, end_id=None, pad_id=None)
MADE = [7, 8, 7]


def resumed(
    made: list[int] = MADE,
    family: type[EngineFamily] = MockFamily,
    told: bool = False,
    fields: dict[str, Any] | None = None,
    **sampling: Any,
) -> EngineRequest | Obstacle:
    given = SamplingParams(**{"max_tokens": 10, "seed": 5, **sampling})
    request = EngineRequest(input_ids=[1, 2], sampling=given, **fields or {})
    return continuation(request, made, family.resume_rules, LIMITS, prompt_told=told)


def request(found: EngineRequest | Obstacle) -> EngineRequest:
    assert isinstance(found, EngineRequest), found
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_was_made_is_prompt_and_counts(family: type[EngineFamily]) -> None:
    found = request(resumed(family=family, min_tokens=5))
    assert found.input_ids == [1, 2, *MADE]
    assert found.resumed_tokens == 3
    assert (found.sampling.max_tokens, found.sampling.min_tokens) == (7, 2)
    assert request(resumed(min_tokens=1)).sampling.min_tokens == 0


def test_nothing_made_begins_anew() -> None:
    found = request(resumed([], fields={"guide": Guide("regex", "a"), "prompt_log_probs": True}))
    assert found.input_ids == [1, 2]
    assert (found.sampling.seed, found.sampling.max_tokens, found.resumed_tokens) == (5, 10, 0)
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


def test_frequency_penalty_is_a_bias_with_vllm() -> None:
    found = request(resumed(family=VLLMFamily, frequency_penalty=0.5, logit_bias={8: 1.0, 9: 2.0}))
    assert found.sampling.logit_bias == {7: -1.0, 8: 0.5, 9: 2.0}
    assert found.sampling.frequency_penalty == 0.5
    for more in ({"repetition_penalty": 1.1}, {"logit_bias": {7: -99.5}}):
        found = resumed(family=VLLMFamily, frequency_penalty=0.5, **more)
        assert isinstance(found, Obstacle)
        assert found.parameter == "frequency_penalty"
    many = resumed(list(range(1025)), VLLMFamily, frequency_penalty=0.5, max_tokens=2000)
    assert isinstance(many, Obstacle)


ASKED: dict[str, dict[str, Any]] = {
    "`frequency_penalty`": {"frequency_penalty": 0.5},
    "`presence_penalty`": {"presence_penalty": 0.5},
    "`repetition_penalty`": {"repetition_penalty": 1.5},
    "guided decoding, forced tool calls": {"fields": {"guide": Guide("regex", "a")}},
    "prompt and output beyond `max_input_len`": {"made": [3] * 19, "max_tokens": 50},
    "`seed`": {},
    "log probabilities": {"fields": {"return_log_probs": True}},
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("parameter", ASKED)
def test_the_table_says_what_ends(parameter: str, family: type[EngineFamily]) -> None:
    ends = parameters(family.resume_rules)[parameter].startswith("E2105")
    assert isinstance(resumed(family=family, **ASKED[parameter]), Obstacle) is ends


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
    now = generate.QUARANTINE_S
    held.check(prompt(1, 2))
    held.add(prompt(3))
    assert len(held._until) == 1


def test_rules_are_conservative_where_a_family_says_nothing() -> None:
    rules = replace(EngineFamily.resume_rules)
    assert rules.frequency_penalty is None
    assert rules.presence_penalty is None
