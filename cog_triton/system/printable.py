"""Names from files and clients as text that cannot control a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters, line ends included, as escapes, but for those to `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
