"""HTTP source of one file: range requests, with every failure a transient or a coded error."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import httpx

from cog_triton.download.retry import TransientError, is_transient
from cog_triton.errors import CogTritonError, ModelUnavailable

_TIMEOUT = httpx.Timeout(30.0, read=60.0, pool=None)
_TRANSIENT = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_MEANING = {
    401: "not authorised",
    403: "not authorised; if the URL is a signed one, it may have expired",
    404: "there is no such file",
    410: "the file is gone for good",
}


@dataclass(frozen=True)
class FileIdentity:
    """Size and validators of a file; bytes of responses that agree in them belong together.

    `etag` and `modified` are None if the server gives none, or only weak ones.
    """

    size: int
    etag: str | None
    modified: str | None


@dataclass(frozen=True)
class Answer:
    """Response body, from byte `start` of the file on.

    Attributes:
        whole: the whole file, whatever range was requested.
        identity: None if the file's size is unknown.
        chunks: the bytes as they arrive, not decoded: the file is what was sent.
    """

    whole: bool
    start: int
    identity: FileIdentity | None
    chunks: Iterator[bytes]


class Source(Protocol):
    """Something that one file is read from, in ranges."""

    @property
    def name(self) -> str: ...
    def get(self, start: int = 0, stop: int | None = None) -> AbstractContextManager[Answer]: ...
    def close(self) -> None: ...


class HTTPSource:
    """HTTP client of one `url`, which errors call `name`.

    Credentials in `headers`, in the URL or of `auth` go to its own host, not to where that
    redirects.
    """

    def __init__(
        self,
        url: str,
        name: str,
        headers: Mapping[str, str] | None = None,
        auth: httpx.Auth | None = None,
    ) -> None:
        self.name = name
        self._url = url
        self._client = httpx.Client(
            headers={**(headers or {}), "Accept-Encoding": "identity"},
            auth=auth,
            follow_redirects=True,
            timeout=_TIMEOUT,
        )

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    @contextmanager
    def get(self, start: int = 0, stop: int | None = None) -> Iterator[Answer]:
        """GET of the bytes from `start` up to `stop`, or of the whole file.

        A server may answer with another range, or all: the caller checks.

        Raises:
            TransientError: a retry may help; also while the chunks are read.
            ModelUnavailable: it will not.
        """
        headers = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        with (
            http_errors(self.name),
            self._client.stream("GET", self._url, headers=headers) as response,
        ):
            yield self._answer(response)

    def _answer(self, response: httpx.Response) -> Answer:
        status, headers = response.status_code, response.headers
        if status == 206:
            match = _RANGE.fullmatch(headers.get("content-range", ""))
            identity = _identity(headers, int(match[3])) if match else None
            return Answer(False, int(match[1]) if match else 0, identity, response.iter_raw())
        if status == 200:
            length = headers.get("content-length", "")
            identity = _identity(headers, int(length)) if length.isdecimal() else None
            return Answer(True, 0, identity, response.iter_raw())
        if status == 416:  # also what an empty file answers
            return Answer(False, 0, None, iter(()))
        problem = f"HTTP {status} {response.reason_phrase}".rstrip()
        if is_transient(status):
            raise TransientError(problem, retry_after(headers.get("retry-after")))
        meaning = f": {_MEANING[status]}" if status in _MEANING else ""
        raise ModelUnavailable(f"{self.name}: {problem}{meaning}")


@contextmanager
def http_errors(name: str, refused: type[CogTritonError] = ModelUnavailable) -> Iterator[None]:
    """Context that turns httpx's errors, on the way to what `name` is, into transient or `refused`.

    None of them says more of a URL than `name` does.
    """
    try:
        yield
    except httpx.InvalidURL:  # its text may hold a password
        raise refused(f"{name}: not a valid URL") from None
    except httpx.HTTPError as error:
        text = str(error) or type(error).__name__
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            text = f"unreachable: {text}"
        if isinstance(error, _TRANSIENT) and "CERTIFICATE_VERIFY_FAILED" not in text:
            raise TransientError(text) from None
        raise refused(f"{name}: {text}") from None


def _identity(headers: httpx.Headers, size: int) -> FileIdentity:
    etag = headers.get("etag")
    strong = None if etag is None or etag.startswith("W/") else etag
    return FileIdentity(size, strong, headers.get("last-modified"))


def retry_after(value: str | None) -> float | None:
    """Seconds of a header Retry-After, None without a usable one."""
    if value is None:
        return None
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
