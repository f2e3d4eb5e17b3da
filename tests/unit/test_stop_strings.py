from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_without_stops_all_text_is_released() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("abc") == "abc"
    assert matcher.flush() == ""


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
