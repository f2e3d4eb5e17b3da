"""Depth and number of values of JSON bodies."""

from __future__ import annotations

import json

import pytest

from cog_triton.errors import InvalidArgument
from cog_triton.front.json_body import JSONLimits, Numbers, require_bounded


def test_depth_counts_brackets_outside_of_strings() -> None:
    limits = JSONLimits(depth=64)
    require_bounded(b"[" * 64 + b"]" * 64, limits)
    require_bounded(b'["' + b"[" * 100 + rb"\"[[" + b'"]', limits)
    require_bounded(b"[" + b"[]," * 1000 + b"{}]", JSONLimits(depth=2))
    for body in (b"[" * 65 + b"]" * 65, b"[[[]]]", b'[[{"a":[]}]]'):
        with pytest.raises(InvalidArgument, match="nested deeper than"):
            require_bounded(body, limits if len(body) > 100 else JSONLimits(depth=2))


@pytest.mark.parametrize(
    "item", [b"0", b"[]", b"{}", b'""', b"null", b"1.5", b'{"a":0}', b'"a,[\\"{"', b" 0\n", b"[0]"]
)
@pytest.mark.parametrize("numbers", Numbers)
def test_values_are_counted_outside_of_strings(item: bytes, numbers: Numbers) -> None:
    body = b'{"a":[' + b",".join([item] * 1000) + b"]}"
    require_bounded(body, JSONLimits(values=4000, numbers=numbers))
    cheap = item.strip().isdigit() or (numbers is Numbers.FREE and item == b"1.5")
    limits = JSONLimits(values=100 if cheap else 900, numbers=numbers)
    if cheap and numbers is Numbers.FREE:
        require_bounded(body, limits)
        return
    with pytest.raises(InvalidArgument, match="MAX_JSON_VALUES"):
        require_bounded(body, limits)


def test_eight_token_ids_count_as_one() -> None:
    ids = json.dumps({"prompt": list(range(1000))}).encode()
    require_bounded(ids, JSONLimits(values=130, numbers=Numbers.IDS))
    with pytest.raises(InvalidArgument, match=r"has \d+ values; 120 at most"):
        require_bounded(ids, JSONLimits(values=120, numbers=Numbers.IDS))
    with pytest.raises(InvalidArgument, match="MAX_JSON_VALUES"):
        require_bounded(ids, JSONLimits(values=130))


def test_what_another_parser_would_read_otherwise_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="UTF-8"):
        require_bounded('{"a":[0]}'.encode("utf-16"), JSONLimits())
    slow = b"[" + b",".join([b"9" * 4000] * 100) + b"]"
    with pytest.raises(InvalidArgument, match="32 characters"):
        require_bounded(slow, JSONLimits())
    require_bounded(b'["' + b"9" * 100_000 + b'"]', JSONLimits())
