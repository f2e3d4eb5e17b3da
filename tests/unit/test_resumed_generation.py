"""Generations that outlive their engine, over a transport that dies when it is told to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from dying_transport import TOKENIZER, World
from loop_thread import call
from scripted_server import PATIENCE_S, wait_until

from cog_triton.engines.step_items import LENGTH, PROMPT, STOP, StepItem
from cog_triton.errors import FatalRequest, TritonUnavailable
from cog_triton.serving import resume
from cog_triton.text.guide import Guide
from cog_triton.triton.infer_stream import failure


def test_a_generation_goes_on_from_prompt_and_tokens_made() -> None:
    world = World()
    running = world.start(sampling={"min_tokens": 7})
    first = world.engine.get(0)
    first.make("abc")
    running.until_told("abc")
    world.die()
    running.until_waiting()
    assert len(world.engine.submissions) == 1
    assert first.cancelled
    first.make("xyz")  # late items of it are dropped
    first.die()
    world.admission.open()
    second = world.engine.get(1)
    assert list(second.request.input_ids) == [1, 2, *TOKENIZER.encode("abc")]
    assert (second.request.sampling.max_tokens, second.request.sampling.min_tokens) == (47, 4)
    second.make("def", STOP)
    assert running.text() == "abcdef"
    assert running.result.output_token_count == 6
    assert running.result.finish_reason == "stop"
    assert running.result.interruptions == 1
    ((tokens, waited),) = running.result.resumptions
    assert tokens == 3
    assert waited > 0
    assert (world.admission.running, world.admission.waiting) == (0, 0)


def test_stop_strings_characters_and_counts_cross_the_seam() -> None:
    world = World()
    running = world.start(stops=["lazy dog"])
    smile = TOKENIZER.encode("\U0001f600")
    first = world.engine.get(0)
    first.make("the ")
    first.put(StepItem(1, 0, first.sent, smile[:2], []))
    world.die()
    world.admission.open()
    second = world.engine.get(1)
    second.put(StepItem(1, 0, 0, smile[2:], []))
    second.sent = len(smile) - 2
    second.make(" la")
    second.die()
    world.admission.release()
    wait_until(lambda: world.checks == 2)
    world.admission.release()
    world.engine.get(2).make("zy dog and more")
    assert running.text() == "the \U0001f600 "
    assert running.result.finish_reason == "stop"


def test_all_tokens_made_need_no_engine() -> None:
    world = World()
    running = world.start(sampling={"max_tokens": 3})
    first = world.engine.get(0)
    first.make("abc")
    first.die()
    assert running.text() == "abc"
    assert running.result.finish_reason == "length"
    assert len(world.engine.submissions) == 1


def test_a_healthy_engine_gets_it_again_after_the_check() -> None:
    world = World()
    running = world.start()
    world.engine.get(0).make("abc")
    running.until_told("abc")
    world.engine.get(0).make("f", lost=2)
    wait_until(lambda: world.checks == 1)
    assert len(world.engine.submissions) == 1
    world.admission.release()
    world.engine.get(1).make("def", STOP)
    assert running.text() == "abcdef"


def test_tries_without_a_token_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_MAX_TRIES", 2)
    world = World()
    running = world.start()
    for number in range(3):
        world.engine.get(number).die()
        wait_until(lambda number=number: world.checks == number + 1)
        world.admission.release()
    assert "2 tries in a row" in str(running.error())
    assert running.result.obstacle == "tries"
    assert len(world.engine.submissions) == 3


def test_what_cannot_go_on_ends_with_e2105_and_why() -> None:
    world = World()
    running = world.start(guide=Guide("regex", "a+"))
    world.engine.get(0).make("aa")
    world.engine.get(0).die()
    error = running.error()
    assert isinstance(error, TritonUnavailable)
    for words in ("the engine's process has ended", "after 2 tokens", "guide"):
        assert words in str(error)
    assert running.texts == ["aa"]
    assert running.result.obstacle == "guide"
    assert world.checks == 1


REPLAYS: dict[str, Any] = {"imports": "always", "replays": True}


def test_what_cannot_go_on_is_made_again_and_told_from_there_on() -> None:
    world = World(**REPLAYS)
    running = world.start(guide=Guide("regex", "a+"), return_log_probs=True)
    world.engine.get(0).make("abc")
    running.until_told("abc")
    world.die()
    world.admission.open()
    second = world.engine.get(1)
    assert second.request == running.generation.request.engine
    ticket = running.generation.ticket
    wait_until(lambda: ticket.exposed)
    second.make("ab")
    wait_until(lambda: not ticket.exposed)  # others have their turn
    assert running.generation.interrupted
    second.make("cde")
    wait_until(lambda: not running.generation.interrupted)
    second.make("f", STOP)
    assert running.text() == "abcdef"
    assert running.result.output_token_count == 6
    ((tokens, _),) = running.result.resumptions
    assert tokens == 3


@pytest.mark.parametrize("others", ["xyz", "ab"])
def test_a_guide_ends_where_others_are_made_again(others: str) -> None:
    """Or fewer of them."""
    world = World(**REPLAYS)
    running = world.start(guide=Guide("regex", "a+"))
    world.engine.get(0).make("abc")
    running.until_told("abc")
    world.die()
    world.admission.open()
    world.engine.get(1).make(others, STOP)
    error = running.error()
    assert isinstance(error, TritonUnavailable)
    assert "made again, the tokens are others: guide cannot go on" in str(error)
    assert running.texts == ["abc"]
    assert running.result.obstacle == "guide"


def test_draws_go_on_otherwise_where_others_are_made_again() -> None:
    world = World(**REPLAYS)
    running = world.start(sampling={"temperature": 1.0, "top_p": 0.9})
    world.engine.get(0).make("abc")
    running.until_told("abc")
    world.die()
    world.admission.open()
    world.engine.get(1).make("ax")
    wait_until(lambda: world.checks == 2)
    world.admission.release()
    third = world.engine.get(2)
    assert list(third.request.made) == TOKENIZER.encode("abc")
    third.make("d", STOP)
    assert running.text() == "abcd"


def test_an_engine_that_takes_output_gets_the_request_as_it_was_with_what_was_made() -> None:
    world = World(imports="asked")
    world.generator.imports = True
    running = world.start(guide=Guide("regex", "a+"), sampling={"presence_penalty": 1.0})
    world.engine.get(0).make("abc")
    running.until_told("abc")
    world.die()
    world.admission.open()
    second = world.engine.get(1)
    asked = running.generation.request.engine
    assert second.request == replace(asked, made=tuple(TOKENIZER.encode("abc")))
    second.put(StepItem(1, PROMPT, 30, [], []))  # with images: the prompt alone
    second.make("def", STOP)
    assert running.text() == "abcdef"
    assert running.result.prompt_length == 30


@pytest.mark.parametrize(
    ("answers", "takes"), [("b", True), ("bc", False), ("E1005 InvalidArgument: made: no", False)]
)
def test_an_engine_is_asked_once_whether_it_takes_output(answers: str, takes: bool) -> None:
    world = World(imports="asked")
    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(call, world.generator.probe)
        world.engine.get(0).make("a", LENGTH)
        asked = world.engine.get(1)
        assert (len(asked.request.made), asked.request.sampling.max_tokens) == (1, 2)
        if answers.startswith("E"):
            asked.put(failure(1, answers))
        else:
            asked.make(answers, LENGTH)
        probing.result(PATIENCE_S)
        assert world.generator.imports is takes
        again = pool.submit(call, world.generator.probe)
        world.engine.get(2).make("a", LENGTH)
        again.result(PATIENCE_S)
    assert len(world.engine.submissions) == 3


def test_log_probs_of_a_prompt_that_was_told_come_once() -> None:
    world = World()
    running = world.start(return_log_probs=True, prompt_log_probs=True)
    first = world.engine.get(0)
    first.put(StepItem(1, PROMPT, 0, [1], [-1.0], width=1))
    first.die()
    wait_until(lambda: world.checks == 1)
    world.admission.release()
    second = world.engine.get(1)
    assert second.request.prompt_log_probs
    second.put(StepItem(1, PROMPT, 0, [1, 2], [-1.0, -2.0], width=1))
    second.make("ab")
    running.until_told("ab")
    second.die()
    wait_until(lambda: world.checks == 2)
    world.admission.release()
    third = world.engine.get(2)
    assert not third.request.prompt_log_probs
    assert third.request.return_log_probs
    third.make("c", LENGTH)
    assert running.text() == "abc"


def test_new_requests_are_rejected_and_queued_ones_keep_their_places() -> None:
    world = World(slots=1)
    running = world.start()
    world.engine.get(0).make("abc")
    queued = world.start(prompt=[5])
    wait_until(lambda: world.admission.waiting == 1)
    world.die()
    running.until_waiting()
    assert "being restarted" in str(world.start().error())
    world.admission.open()
    second = world.engine.get(1)
    second.make("d", STOP)
    assert running.text() == "abcd"
    world.engine.get(2).make("q", STOP)
    assert queued.text() == "q"


def test_a_request_that_kills_the_engine_ends_and_its_prompt_is_refused() -> None:
    world = World()
    innocent = world.start(prompt=[1])
    world.engine.get(0).make("a")
    innocent.until_told("a")
    poison = world.start(prompt=[6, 6])
    world.engine.get(1)
    assert world.admission.suspects == 1

    def die_and_return() -> None:
        world.die()
        innocent.until_waiting()
        poison.until_waiting()
        world.admission.open()

    die_and_return()
    again = world.engine.get(2)
    assert again.request.input_ids[0] == 1, "the innocent goes first"
    assert len(world.engine.submissions) == 3, "the suspect waits for its token"
    again.make("b")
    assert list(world.engine.get(3).request.input_ids) == [6, 6]
    die_and_return()
    assert list(world.engine.get(4).request.input_ids) == [6, 6], "alone, as it may be its last"
    world.die()
    error = poison.error()
    assert isinstance(error, FatalRequest)
    assert error.detail == "the engine died 3 times when it got this request"
    world.admission.open()
    assert isinstance(world.start(prompt=[6, 6]).error(), FatalRequest)
    world.engine.get(5).make("c", STOP)
    assert innocent.text() == "abc"
    assert len(world.engine.submissions) == 6
