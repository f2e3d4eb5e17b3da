"""Stop words over token ids: cut wherever they fall; nothing else is lost or delayed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cog_triton.engines.stop_words import StopWords

IDS = st.integers(0, 2)
WORDS = st.lists(st.lists(IDS, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple)


def stopped(tokens: list[int], words: tuple[tuple[int, ...], ...], min_tokens: int) -> list[int]:
    """What must come out, looked for from the beginning at every token."""
    for count in range(min_tokens + 1, len(tokens) + 1):
        ends = [len(w) for w in words if tuple(tokens[max(0, count - len(w)) : count]) == w]
        if ends:
            return tokens[: count - max(ends)]
    return tokens


@given(st.lists(IDS, max_size=30), WORDS, st.integers(0, 10))
def test_the_output_ends_before_the_first_stop_word(
    tokens: list[int], words: tuple[tuple[int, ...], ...], min_tokens: int
) -> None:
    output = StopWords(words, min_tokens)
    sent: list[tuple[int, float]] = []
    for place, token in enumerate(tokens):
        if output.add(token, float(place)):
            break
        sent += output.ready()
    sent += output.rest()
    expected = stopped(tokens, words, min_tokens)
    # A word may begin in tokens that are out already, when min_tokens let them pass.
    assert sent[: len(expected)] == [(t, float(p)) for p, t in enumerate(expected)]
    assert len(sent) == len(expected) or min_tokens


def test_without_stop_words_nothing_is_held_back() -> None:
    output = StopWords((), 0)
    assert not output.add(7, -0.5)
    assert output.ready() == [(7, -0.5)]
    assert output.count == 1


def test_only_a_possible_beginning_of_a_stop_word_is_held_back() -> None:
    output = StopWords(((1, 2, 3),), 0)
    for token in (5, 1, 2):
        output.add(token, 0.0)
    assert output.ready() == [(5, 0.0)]
    output.add(4, 0.0)
    assert output.ready() == [(1, 0.0), (2, 0.0), (4, 0.0)]
