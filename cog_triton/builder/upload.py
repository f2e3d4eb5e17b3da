"""Upload of engine.tar: an HTTP PUT streamed from disk in bounded memory, retried with backoff."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

from cog_triton.download.retry import is_transient
from cog_triton.errors import BuildStepFailed, InvalidArgument
from cog_triton.system.redaction import redact_url

# 600 s: some stores answer only after they have checked all that they got.
_TIMEOUT = httpx.Timeout(60.0, read=600.0)
_CHUNK = 1 << 20
_PROGRESS_SHARE = 0.1


def check(url: str) -> None:
    """Raise InvalidArgument unless `url` is one that `put` can use."""
    try:
        parsed = httpx.URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host)
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise InvalidArgument("upload_url: must be an http(s):// URL")


def put(
    path: Path, url: str, echo: Callable[[str], None], pauses_s: Sequence[float] = (1, 4, 16)
) -> None:
    """PUT the file at `path` to `url`; retry after each of `pauses_s` on transient errors.

    Raises:
        InvalidArgument: the server refuses it (a status that is neither 2xx nor 5xx).
        BuildStepFailed: it still fails after the last pause.
    """
    size = path.stat().st_size
    headers = {"Content-Length": str(size), "Content-Type": "application/x-tar"}
    for pause in (*pauses_s, None):
        try:
            content = _chunks(path, size, echo)
            response = httpx.put(url, content=content, headers=headers, timeout=_TIMEOUT)
        except httpx.TransportError as error:
            problem = str(error) or type(error).__name__
        else:
            if response.is_success:
                return
            problem = f"HTTP {response.status_code} {response.reason_phrase}"
            if not is_transient(response.status_code):
                raise InvalidArgument(f"upload_url={redact_url(url)!r}: {problem}")
        if pause is not None:
            echo(f"[upload] {problem}; again in {pause:g} s")
            time.sleep(pause)
    tries = len(pauses_s) + 1
    raise BuildStepFailed(f"upload to {redact_url(url)} failed {tries} times: {problem}")


def _chunks(path: Path, size: int, echo: Callable[[str], None]) -> Iterator[bytes]:
    sent, told = 0, 0.0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
            sent += len(chunk)
            if sent == size or sent / size - told >= _PROGRESS_SHARE:
                told = sent / size
                echo(f"[upload] {told:.0%} of {size / 1e6:.0f} MB")
