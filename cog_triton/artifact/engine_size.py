"""Size of an engine that is named by its weights: what loading it takes in memory at least."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit


def engine_bytes(weights: str) -> int | None:
    """Bytes of an engine directory's files, or of its tar; None for a URL, or what is not there.

    A compressed tar counts as it is: weights hardly get smaller.
    """
    if not weights:
        return None
    url = urlsplit(weights) if "://" in weights else None
    if url is not None and url.scheme != "file":
        return None
    path = Path(unquote(url.path) if url else weights)
    if path.is_dir():
        return sum(found.stat().st_size for found in path.rglob("*") if found.is_file())
    return path.stat().st_size if path.is_file() else None
