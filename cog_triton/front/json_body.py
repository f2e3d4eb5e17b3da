"""JSON bodies of requests: decompressed, bounded in size, depth and values, and written anew."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from backports import zstd

from cog_triton import errors

_SPACE = b" \t\r\n"
_LONG_NUMBER = re.compile(rb"[-+.\deE]{33}")
_BRACES_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# A parser takes 60 us for one number of 4300 digits: this many bytes hold few of them.
_FEW_BYTES = 64 << 10
_IDS_AS_ONE = 8


class Numbers(Enum):
    """How numbers in lists count among the values of a body."""

    EACH = "each"
    IDS = "ids"
    """Whole ones, such as token ids, an eighth each."""
    FREE = "free"
    """Not at all: tensors."""


_IDS, _FREE = re.compile(rb"\[[\d,]+\]"), re.compile(rb"\[[-+.\deE,]+\]")


@dataclass(frozen=True, slots=True)
class JSONLimits:
    """How deep a body may be nested, and how many values it may have."""

    depth: int = 64
    values: int = 32768
    numbers: Numbers = Numbers.EACH


ENCODINGS = ("gzip", "deflate", "zstd")
# RFC 9659: a decoder need not remember more than 8 MB.
_ZSTD = {int(zstd.DecompressionParameter.window_log_max): 23}


def inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """The body before its compression, one of `ENCODINGS`.

    Raises:
        RequestTooLarge: it has more than `limit` bytes; no more are decoded.
        InvalidArgument: the body is not one whole stream of `encoding`.
    """
    decompressor = (
        zstd.ZstdDecompressor(options=_ZSTD)
        if encoding == "zstd"
        else zlib.decompressobj(zlib.MAX_WBITS | (16 if encoding == "gzip" else 0))
    )
    try:
        result = decompressor.decompress(body, limit + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise errors.InvalidArgument(
            f"body: not {encoding}, which Content-Encoding names: {error}"
        ) from error
    if len(result) > limit:
        rule = f"the body has more than {limit} bytes uncompressed; MAX_REQUEST_BYTES is {limit}"
        raise errors.RequestTooLarge(rule)
    if not decompressor.eof or decompressor.unused_data:
        raise errors.InvalidArgument(f"body: not one whole {encoding} stream")
    return result


def require_bounded(body: bytes, limits: JSONLimits) -> None:
    """Raise E1005 for a body that is nested too deep or has too many values; builds no objects.

    Other text than JSON may pass, but no parser that reads it gets deeper, or reads more values.
    """
    if b"\0" in body:
        raise errors.InvalidArgument("body: has a NUL byte; must be JSON in UTF-8")
    opened = body.count(b"[") + body.count(b"{")
    few = len(body) <= _FEW_BYTES and opened + body.count(b",") <= limits.values
    if few and opened <= limits.depth:
        return
    plain = _without_strings(body).translate(None, _SPACE)
    _require_few_values(plain, limits)
    _require_shallow(plain, limits.depth)


def _without_strings(body: bytes) -> bytes:
    r"""The body with ``s`` in the place of each string, the last of which may have no end.

    Without ``\\`` and ``\"`` every quote begins or ends a string. A backslash outside of strings
    ends JSON, so what is made of the rest does not matter.
    """
    return b"s".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])


def _require_few_values(plain: bytes, limits: JSONLimits) -> None:
    if _LONG_NUMBER.search(plain):
        raise errors.InvalidArgument("body: a number has more than 32 characters, or not JSON")
    found = _count(plain)
    if found > limits.values and limits.numbers is not Numbers.EACH:
        are_ids = limits.numbers is Numbers.IDS
        rest = _count((_IDS if are_ids else _FREE).sub(b"", plain))
        found = rest + (found - rest) // _IDS_AS_ONE * are_ids
    if found > limits.values:
        raise errors.InvalidArgument(
            f"body: has {found} values; {limits.values} at most (MAX_JSON_VALUES)"
        )


def _count(plain: bytes) -> int:
    """Values outside of strings; an empty list or object may count as two."""
    return plain.count(b",") + plain.count(b"[") + plain.count(b"{")


def _require_shallow(plain: bytes, limit: int) -> None:
    brackets = plain.translate(_BRACES_AS_BRACKETS, _ALL_BUT_BRACKETS)
    # Of the others there are few by now: no more than the body may have values.
    brackets = brackets.replace(b"[]", b"")
    if 2 * brackets.count(b"[") == len(brackets):
        for _ in range(limit):  # a level in each round, from within
            if not brackets:
                return
            brackets = brackets.replace(b"[]", b"")
    raise errors.InvalidArgument(f"body: nested deeper than {limit}, or not JSON")


def parsed(body: bytes, limits: JSONLimits) -> dict[str, Any]:
    """A JSON object; raises E1005 for anything else, and beyond the limits."""
    require_bounded(body, limits)
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise errors.InvalidArgument("body: nested too deep") from None
    except ValueError as error:
        raise errors.InvalidArgument(f"body: not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise errors.InvalidArgument(f"body: a JSON {type(value).__name__}; must be an object")
    return value


def member(body: bytes, name: str) -> Any:
    """The value of `name` in a bounded JSON object, or None."""
    try:
        return json.loads(body)[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def written(value: dict[str, Any]) -> bytes:
    """The JSON of `value`; raises E1005 for numbers that no JSON can hold."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise errors.InvalidArgument(f"body: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
