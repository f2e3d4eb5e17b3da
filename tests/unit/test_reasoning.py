"""Count of reasoning tokens, by the texts that the tokens complete."""

from __future__ import annotations

import pytest

from cog_triton.text.reasoning import ReasoningCount


@pytest.mark.parametrize(
    ("texts", "opened", "expected"),
    [
        (["<think>", "a", "</think>", "b"], False, 3),
        (["\n", "<", "thi", "nk>a</th", "ink>b", "c"], False, 5),
        (["a", "", "b</think>c", "d"], True, 3),
        (["<think>", "a", "</think>", "b"], True, 3),
        (["<think>", "a", "b"], False, 3),
        (["a", "<think>", "b", "</think>"], False, 0),
        (["<thin", "g>", "b"], False, 0),
    ],
)
def test_tokens_count_up_to_the_closing_marker(
    texts: list[str], opened: bool, expected: int
) -> None:
    count = ReasoningCount("<think>", "</think>", opened)
    for text in texts:
        if not count.ended:
            count.add(text)
    assert count.tokens == expected
