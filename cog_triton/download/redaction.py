"""Redaction of URLs for logs and errors."""

from __future__ import annotations

from urllib.parse import urlsplit


def redact_url(url: str) -> str:
    """`url` without its possible secrets: user, password, query and fragment.

    Raises:
        ValueError: not a URL.
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()


def redact_address(address: str) -> str:
    """A path as it is, a URL of any scheme redacted; never fails.

    Of a URL that cannot be taken apart, such as one whose password has a bare ``/`` or ``#``, only
    the scheme is left.
    """
    scheme, mark, _ = address.partition("://")
    if not mark:
        return address
    try:
        _ = urlsplit(address).port  # the part of such a password that precedes the / or #
        redacted = redact_url(address)
    except ValueError:
        redacted = ""
    return redacted if redacted and "@" not in redacted else f"{scheme.rpartition('@')[2]}://..."
