"""JSON bodies of requests: decompressed, bounded in size and depth, and written anew."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

from cog_triton import errors
from cog_triton.door.message import Refused

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACES_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def inflated(body: bytes, encoding: bytes, limit: int) -> bytes:
    """The body as it was before compression; raises Refused with 413 beyond `limit` bytes."""
    encoding = encoding.lower()
    if encoding in (b"", b"identity"):
        return body
    if encoding not in (b"gzip", b"deflate"):
        name = encoding[:20].decode("latin-1")
        raise errors.InvalidArgument(f"Content-Encoding={name!r}: must be gzip or deflate")
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | (16 if encoding == b"gzip" else 0))
    try:
        result = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise errors.InvalidArgument(f"body: not {encoding.decode()}: {error}") from error
    if len(result) > limit:
        rule = f"the body has more than {limit} bytes uncompressed; MAX_REQUEST_BYTES is {limit}"
        raise Refused(413, errors.RequestTooLarge(rule))
    if not decompressor.eof or decompressor.unused_data:
        raise errors.InvalidArgument(f"body: not one whole {encoding.decode()} stream")
    return result


def require_shallow(body: bytes, limit: int) -> None:
    """Raise E1005 if arrays and objects are nested deeper than `limit`; builds no objects.

    Other text than JSON may pass, but no parser that reads it gets deeper.
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    brackets = _STRINGS.sub(b"", body).translate(_BRACES_AS_BRACKETS, _ALL_BUT_BRACKETS)
    for _ in range(limit):  # a level in each round, from within
        brackets = brackets.replace(b"[]", b"")
        if b"[" not in brackets:
            return
    raise errors.InvalidArgument(f"body: nested deeper than {limit} (MAX_JSON_DEPTH), or not JSON")


def parsed(body: bytes, max_depth: int) -> dict[str, Any]:
    """A JSON object; raises E1005 for anything else, and for one that is nested too deep."""
    require_shallow(body, max_depth)
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise errors.InvalidArgument("body: nested too deep") from None
    except ValueError as error:
        raise errors.InvalidArgument(f"body: not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise errors.InvalidArgument(f"body: a JSON {type(value).__name__}; must be an object")
    return value


def written(value: dict[str, Any]) -> bytes:
    """The JSON of `value`; raises E1005 for numbers that no JSON can hold."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise errors.InvalidArgument(f"body: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
