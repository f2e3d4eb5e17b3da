"""Resumption: the order, the request that continues, and each promise of docs/supervision.md."""

from __future__ import annotations

from pathlib import Path
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
from cog_triton.serving.generation import GenerationRequest
from cog_triton.serving.quarantine import QUARANTINE_S, Quarantine
from cog_triton.serving.resume import Obstacle, continuation
from cog_triton.serving.resume_order import ResumeOrder
from cog_triton.serving.ticket import MAX_DEATHS, Ticket
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import DrawnSeed, SamplingParams, resolve_seed


def stays(order: ResumeOrder, count: int, exposed: int = 0) -> list[Ticket]:
    """Requests in the engine that died: all wait, the first `exposed` of them as suspects."""
    made = [
        Ticket(number=number, epoch=order.epoch, exposed=number < exposed)
        for number in range(count)
    ]
    order.died(made)
    for stay in reversed(made):
        order.add(stay)
    return made


def test_prefills_are_spread_in_order_of_arrival() -> None:
    order = ResumeOrder()
    made = stays(order, 6)
    assert order.next_turns() == made[:4]
    assert order.next_turns() == []
    assert order.holds
    order.proven(made[2])
    assert order.next_turns() == [made[4]]
    order.remove(made[0])
    assert order.next_turns() == [made[5]]
    assert not order.holds


def test_suspects_go_last_and_alone() -> None:
    order = ResumeOrder()
    made = stays(order, 5, exposed=2)
    assert order.next_turns() == made[2:]
    for stay in made[2:4]:
        order.proven(stay)
        assert order.next_turns() == []
    order.proven(made[4])
    assert order.next_turns() == [made[0]]
    assert order.holds
    order.proven(made[0])
    assert order.next_turns() == [made[1]]
    assert order.holds
    order.remove(made[1])
    assert not order.holds


def test_nobody_is_blamed_for_a_death_that_others_may_have_caused() -> None:
    order = ResumeOrder()
    only = Ticket()
    for _ in range(2 * MAX_DEATHS):
        only.exposed = True
        order.died([only], blame=False)
        only.exposed = True
        order.lost([only], 0, blame=False)
    assert only.blamed == 0
    assert only.suspect, "it goes on alone in prefill all the same"


def test_the_verdict_needs_a_death_alone_in_the_engine() -> None:
    order = ResumeOrder()
    made = stays(order, 3, exposed=1)
    (suspect, *others) = made
    assert order.next_turns() == others, "after the first death it goes last"
    for stay in others:
        order.proven(stay)
    assert order.next_turns() == [suspect]
    for stay in made:
        stay.exposed, stay.epoch = stay is suspect, order.epoch
    order.died(made)
    assert suspect.blamed == MAX_DEATHS - 1
    for stay in made:
        order.add(stay)
    assert order.next_turns() == [suspect], "first, and no other beside it"
    assert order.holds
    suspect.exposed, suspect.epoch = True, order.epoch
    others[0].epoch = order.epoch
    order.remove(others[0])  # as if it had been in the engine, too
    order.died(made)
    assert suspect.blamed == MAX_DEATHS - 1, "it was not alone"
    order.add(suspect)
    assert order.next_turns() == [suspect]
    suspect.exposed, suspect.epoch = True, order.epoch
    order.died(made)
    assert (suspect.blamed, suspect.suspected) == (MAX_DEATHS, MAX_DEATHS + 1)
    order.proven(suspect)
    assert (suspect.blamed, suspect.suspected) == (0, 0)


def several(order: ResumeOrder, *engines: int, exposed: int = 0) -> list[Ticket]:
    """Requests in several engines, the first `exposed` of them without a token."""
    return [
        Ticket(number=number, epoch=order.epoch, exposed=number < exposed, replica=engine)
        for number, engine in enumerate(engines)
    ]


def test_the_death_of_one_of_several_engines_concerns_its_requests_alone() -> None:
    order = ResumeOrder()
    made = several(order, 0, 1, 0, 1, exposed=2)
    order.lost(made, 0)
    assert [stay.blamed for stay in made] == [1, 0, 0, 0]
    assert [stay.exposed for stay in made] == [False, True, False, False]
    assert order.next_turns() == []
    for stay in (made[2], made[0]):
        order.add(stay)
    assert order.next_turns() == [made[2]], "at once, and the suspect later"
    order.proven(made[2])
    assert order.next_turns() == [made[0]]


def test_a_killer_is_caught_though_others_run_beside_it() -> None:
    order = ResumeOrder()
    killer, *others = made = several(order, 0, 0, 1, 1, exposed=1)
    for engine in (0, 1, 0):
        order.lost(made, engine)
        order.add(killer)
        for _ in range(2):
            for stay in order.next_turns():
                stay.epoch, stay.exposed, stay.replica = order.epoch, True, 1 - engine
    assert killer.blamed == MAX_DEATHS
    assert not any(stay.blamed for stay in others)


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


def engine_request(found: EngineRequest | Obstacle) -> EngineRequest:
    assert isinstance(found, EngineRequest), found
    return found


def test_what_was_made_is_prompt_and_counts() -> None:
    found = engine_request(resumed(min_tokens=5))
    assert found.input_ids == [1, 2, *MADE]
    assert (found.sampling.max_tokens, found.sampling.min_tokens, found.made) == (7, 2, ())
    assert engine_request(resumed(min_tokens=1)).sampling.min_tokens == 0


@pytest.mark.parametrize("family", [MockFamily, OpenVINOFamily])
def test_what_was_made_is_output_where_the_engine_takes_it(family: type[EngineFamily]) -> None:
    found = engine_request(resumed(family=family, min_tokens=5))
    assert (found.input_ids, found.made) == ([1, 2], (7, 8, 7))
    assert (found.sampling.max_tokens, found.sampling.min_tokens) == (10, 5)


def test_nothing_made_begins_anew() -> None:
    found = engine_request(
        resumed([], fields={"guide": Guide("regex", "a"), "prompt_log_probs": True})
    )
    assert found.input_ids == [1, 2]
    assert (found.sampling.seed, found.sampling.max_tokens, found.made) == (5, 10, ())
    assert found.prompt_log_probs


def test_log_probs_of_the_prompt_are_told_once() -> None:
    fields = {"return_log_probs": True, "prompt_log_probs": True, "top_log_probs": 2}
    found = engine_request(resumed(told=True, fields=fields))
    assert (found.return_log_probs, found.top_log_probs) == (True, 2)
    assert not found.prompt_log_probs
    assert not engine_request(resumed([], told=True, fields=fields)).prompt_log_probs


def test_a_guide_ends_it_once_there_is_a_token() -> None:
    found = resumed(fields={"guide": Guide("regex", "a")})
    assert isinstance(found, Obstacle)
    assert found.parameter == "guide"


def test_frequency_penalty_is_a_bias_with_vllm_that_takes_no_output() -> None:
    found = engine_request(
        resumed(family=VLLMFamily, frequency_penalty=0.5, logit_bias={8: 1.0, 9: 2.0})
    )
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


def test_a_seed_that_was_drawn_stays_one() -> None:
    assert isinstance(resolve_seed(-1), DrawnSeed)
    assert not isinstance(resolve_seed(7), DrawnSeed)
    made = resumed(family=OpenVINOFamily, seed=resolve_seed(None), **DRAWS)
    assert engine_request(made).made == (7, 8, 7)
    assert engine_request(resumed(family=OpenVINOFamily, **DRAWS)).made == ()


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
