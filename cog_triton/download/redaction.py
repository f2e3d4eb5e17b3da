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
