"""Guides of guided decoding: what may reach an engine's compiler."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.engines.openvino.guides import check
from cog_triton.errors import InvalidArgument
from cog_triton.text.guide import Guide, GuideKind, choice_guide

WHERE = "guided_regex"


@pytest.mark.parametrize(
    "text",
    [
        "^abc$",
        r"a\$$",
        r"\d{3}-\d{4,}",
        r"[a-zA-Z_\-.][^\]\\]{0,9}",
        r"[\d\w-]+",
        r"\x41ä?\n",
        "a|b|(c|(d|e)*)",
        r"\(\[\{",
        ".{0,120}",
        r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d+)?)?Z?)?",
        r"-?\d+(\.\d+)?(, -?\d+(\.\d+)?)*",
        "name: .+\\nage: [0-9]{1,3}\\n[a-z]{2,20} [a-z]{2,20}",
    ],
)
def test_common_expressions_pass(text: str) -> None:
    check(Guide("regex", text), WHERE)
    re.compile(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("()", "empty"),
        ("(a", "without its ')'"),
        ("[a", "must be characters"),
        ("[]a]", "must be characters"),
        ("[z-a]", "no order"),
        (r"[a-\d]", "no order"),
        ("[[:alpha:]]", "must be characters"),
        ("*a", "nothing to repeat"),
        ("a**", "nothing to repeat"),
        ("a{,3}", "{m}, {m,} or {m,n}"),
        ("a{3,2}", "in order"),
        ("a{513}", "512 at most"),
        ("(a{200}){9}", "1789 more characters"),
        ("a*" * 129, "more than 128 repetitions"),
        ("(?=a)b", "looking around"),
        ("(?P<x>a)", "without names"),
        (r"\bab", "known escapes"),
        ("a\\", "known escapes"),
        ("a^b", "anchors are at both ends"),
        ("(" * 17 + "a" + ")" * 17, "nested deeper than 16"),
        ("a" * 40_000, "characters; 32768 at most"),
        ("a" * 20_000, "20000 characters; 16640 at most"),
    ],
)
def test_others_are_refused_with_their_place(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)) as caught:
        check(Guide("regex", text), WHERE)
    assert caught.value.detail.startswith(WHERE)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        r"\W\D" * 65,
        "[a-z]{129}",
        "(.?){128}",
        "(.{0,15}){4}",
        "(.*a.{0,255}){2}",
        "|".join(f"(.*{letter}.*)" for letter in "abcdefghijklmnop"),
        "|".join(f"({digit}|[0-9]*{digit}[0-9]*)" for digit in range(10)),
    ],
)
def test_what_compiled_for_many_seconds_is_refused(text: str) -> None:
    """Each took OpenVINO seconds to minutes, or would: the longest ones were not waited for."""
    with pytest.raises(InvalidArgument, match="takes too long to compile"):
        check(Guide("regex", text), WHERE)


@given(st.text(alphabet="ab()[]{}|*+?\\^$.-,01:dw", max_size=12))
def test_whatever_passes_is_an_expression(text: str) -> None:
    try:
        check(Guide("regex", text), WHERE)
    except InvalidArgument:
        return
    re.compile(text)


@given(st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1), min_size=1))
def test_choices_match_themselves_alone(choices: list[str]) -> None:
    guide = choice_guide(choices, "guided_choice")
    check(guide, "guided_choice")
    for choice in choices:
        assert re.fullmatch(guide.text, choice)
    assert not re.fullmatch(guide.text, "".join(choices) + "x")


@pytest.mark.parametrize("choices", [[], [""], ["a"] * 257, ["a" * 20_000], ["\0"]])
def test_choices_that_are_none_or_too_many(choices: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="guided_choice"):
        choice_guide(choices, "guided_choice")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", " "),
        ("grammar", "a" * 20_000),
        ("native_tag", "a" * 300_000),
        ("native_tag", "[" * 129),
        ("grammar", "root ::= " + "(" * 25 + '"a"' + ")" * 25),
        ("json_schema", "{"),
        ("json_schema", "[" * 129),
        ("json_schema", "[]"),
        ("structural_tag", "[]"),
        ("regex", ""),
        ("regex", "(" * 65),
    ],
)
def test_guides_of_any_engine_are_bounded(kind: GuideKind, text: str) -> None:
    with pytest.raises(InvalidArgument, match="here"):
        Guide(kind, text).check("here")
    Guide("grammar", 'root ::= "a" | "b"').check("here")
    Guide("regex", r"\(" * 100 + "(?=a)").check("here")
    Guide("json_schema", '{"pattern": "a"}').check("here")
