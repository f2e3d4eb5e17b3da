"""URLs as they may be shown."""

from __future__ import annotations

from urllib.parse import urlsplit


def shown(url: str) -> str:
    """`url` without what may be secret: user, password, query and fragment.

    Raises:
        ValueError: it is no URL.
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()
