"""Stop strings over text and stop words over token ids: nothing else is lost or delayed."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.engines.stop_words import StopWords
from cog_triton.errors import InvalidArgument
from cog_triton.text.stop_strings import StopMatcher, parse_stop_sequences


def run(stops: list[str], text: str, cuts: list[int]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    chunks = [matcher.feed(text[start:end]) for start, end in pairwise([0, *cuts, len(text)])]
    return [*chunks, matcher.flush()], matcher.matched


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """The earliest start wins; of two that start alike, the shorter."""
    found = [(text.index(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


@settings(max_examples=20 * settings.default.max_examples)
@given(
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.text("abc", max_size=40),
    st.data(),
)
def test_matches_agree_with_searching_the_whole_text(
    stops: list[str], text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    chunks, matched = run(stops, text, cuts)
    assert ("".join(chunks), matched) == naive(stops, text)


@settings(max_examples=5 * settings.default.max_examples)
@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3), st.text("abc"))
def test_only_what_can_still_match_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    released = ""
    for end, char in enumerate(text, start=1):
        released += matcher.feed(char)
        if matcher.matched is not None:
            break
        held = text[len(released) : end]
        complete = any(stop in held for stop in stops)
        assert complete or held == "" or any(stop.startswith(held) for stop in stops)


def test_only_the_text_before_the_match_is_released() -> None:
    matcher = StopMatcher(["<end>"])
    assert [matcher.feed(part) for part in ["say <e", "nd", "> no", "more"]] == ["say ", "", "", ""]
    assert matcher.matched == "<end>"
    assert matcher.flush() == ""


def test_a_partial_match_is_released_as_soon_as_it_fails() -> None:
    matcher = StopMatcher(["<end>"])
    assert [matcher.feed(part) for part in ["a<e", "x", "<en"]] == ["a", "<ex", ""]
    assert matcher.flush() == "<en"
    assert matcher.matched is None


def test_a_match_waits_for_one_that_may_start_earlier() -> None:
    assert run(["abcd", "bc"], "xabcd!", [4]) == (["x", "", ""], "abcd")
    assert run(["abcd", "bc"], "xabcx!", [4]) == (["x", "a", ""], "bc")
    assert run(["abcd", "bc"], "xabc", [4]) == (["x", "", "a"], "bc")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"E1005 .*stop_sequences"):
        StopMatcher(["a", ""])


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        (None, []),
        ("", []),
        ("<end>,<stop>", ["<end>", "<stop>"]),
        (",<end>,,", ["<end>"]),
        ("\n, x", ["\n", " x"]),
    ],
)
def test_stop_sequences_are_split_at_commas(text: str | None, stops: list[str]) -> None:
    assert parse_stop_sequences(text) == stops


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


def test_only_a_possible_beginning_of_a_stop_word_is_held_back() -> None:
    output = StopWords(((1, 2, 3),), 0)
    for token in (5, 1, 2):
        output.add(token, 0.0)
    assert output.ready() == [(5, 0.0)]
    output.add(4, 0.0)
    assert output.ready() == [(1, 0.0), (2, 0.0), (4, 0.0)]
