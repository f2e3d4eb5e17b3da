"""Choice of one of several engines: by load, by prefix, and by turns."""

from __future__ import annotations

from cog_triton.engines.engine_client import TOKENS_A_REQUEST, ReplicaChoice

SYSTEM = list(range(1000, 1000 + 2 * TOKENS_A_REQUEST))


def prompt(*last: int) -> list[int]:
    """A prompt that begins as others do."""
    return [*SYSTEM, *last]


def test_engines_that_are_alike_take_turns() -> None:
    choice = ReplicaChoice()
    assert [choice.choose([n], {0: 0, 1: 0, 2: 0}) for n in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_one_with_least_to_do_is_chosen() -> None:
    choice = ReplicaChoice()
    assert choice.choose([1], {0: 3, 1: 2, 2: 4}) == 1
    assert choice.choose([1], {0: 3, 2: 3.5}) == 0, "of those that are there"


def test_a_prefix_draws_a_request_as_far_as_it_is_worth() -> None:
    choice = ReplicaChoice()
    first = choice.choose(prompt(1), {0: 0, 1: 0})
    other = 1 - first
    for more in (0, 1, 1.9):
        assert choice.choose(prompt(2, 3), {first: more, other: 0}) == first
    assert choice.choose(prompt(4), {first: 2.1, other: 0}) == other
    assert choice.choose(prompt(5), {first: 0, other: 0.1}) == first, "now both have it"


def test_a_short_prompt_has_no_prefix() -> None:
    choice = ReplicaChoice()
    assert choice.choose([7] * 31, {0: 0, 1: 0.1}) == 0
    assert choice.choose([7] * 31, {0: 0.1, 1: 0}) == 1


def test_adapters_have_prefixes_of_their_own() -> None:
    choice = ReplicaChoice()
    assert choice.choose(prompt(), {0: 0, 1: 0.1}, "a") == 0
    assert choice.choose(prompt(), {0: 0.1, 1: 0}, "b") == 1
    assert choice.choose(prompt(), {0: 0.1, 1: 0}, "a") == 0


def test_a_dead_engine_is_forgotten() -> None:
    choice = ReplicaChoice()
    assert choice.choose(prompt(), {0: 0, 1: 0.1}) == 0
    choice.forget(0)
    assert choice.choose(prompt(), {0: 0.1, 1: 0}) == 1
