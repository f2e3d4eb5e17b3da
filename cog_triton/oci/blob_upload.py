"""Upload of a blob to a registry: in chunks, resumed where the registry says that it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

import httpx

from cog_triton.download.retry import TransientError
from cog_triton.oci.registry_client import Registry

CHUNK = 64 << 20
LEAST_CHUNK = 4 << 20
_RANGE = re.compile(r"(?:bytes=)?0-(\d+)")
_OCTETS = "application/octet-stream"


class Blob(Protocol):
    """What is sent, which is read again after a failure."""

    @property
    def size(self) -> int: ...
    def read(self, start: int = 0) -> Iterator[bytes]: ...


class Upload:
    """Upload of `blob`, whose digest is `digest`, through `registry`.

    Args:
        source: repository of the same registry to mount it from, if it is there.
        sent: called with the bytes sent; a negative number takes back.
    """

    def __init__(
        self,
        registry: Registry,
        digest: str,
        blob: Blob,
        source: str | None,
        sent: Callable[[int], None],
    ) -> None:
        self._registry = registry
        self._digest = digest
        self._blob = blob
        self._source = source
        self._sent = sent
        self._location = httpx.URL("")
        self._at = self._most = 0
        self._chunk = CHUNK
        self._interrupted = False

    def run(self) -> bool:
        """Send the blob; False if the registry has it, in this repository or another."""
        if self._registry.retried(self._is_there) or self._registry.retried(self._start):
            return False
        self._registry.retried(self._send, lambda: self._most)
        return True

    def _is_there(self) -> bool:
        url = f"{self._registry.url}/blobs/{self._digest}"
        with self._registry.answer("HEAD", url, (200, 404)) as response:
            return response.status_code == 200

    def _start(self) -> bool:
        """Begin an upload; True if there is none, as the blob could be mounted."""
        # Without a repository to mount from, a registry may look in all of them.
        query = {"mount": self._digest, **({"from": self._source} if self._source else {})}
        url = f"{self._registry.url}/blobs/uploads/"
        with self._registry.answer("POST", url, (201, 202), params=query) as response:
            if response.status_code == 201:
                return True
            self._move_to(0)
            self._location = self._next(response)
            return False

    def _send(self) -> None:
        """Send what the registry has not got; after a failure it is asked how much that is."""
        if self._interrupted:
            if self._is_there():
                return
            self._resume()
        self._interrupted = True
        whole = self._at == 0 and self._blob.size <= self._chunk
        while not whole and self._at < self._blob.size:
            self._patch(self._at, min(self._at + self._chunk, self._blob.size))
        content = _Slice(self, 0, self._blob.size) if whole else b""
        headers = {"Content-Length": str(self._blob.size if whole else 0), "Content-Type": _OCTETS}
        url = self._location.copy_merge_params({"digest": self._digest})
        with self._registry.answer(
            "PUT", url, (201, 204, 404), content=content, headers=headers
        ) as response:
            if response.status_code != 404:
                return
        self._restart("the upload has gone")

    def _patch(self, start: int, stop: int) -> None:
        headers = {
            "Content-Type": _OCTETS,
            "Content-Length": str(stop - start),
            "Content-Range": f"{start}-{stop - 1}",
        }
        content = _Slice(self, start, stop)
        with self._registry.answer(
            "PATCH", self._location, (202, 404, 413, 416), content=content, headers=headers
        ) as response:
            if response.status_code == 202:
                self._location = self._next(response)
                self._move_to(_held(response, stop))
                return
            too_large = response.status_code == 413 and self._chunk > LEAST_CHUNK
        self._move_to(start)
        if too_large:
            self._chunk //= 4
            return
        self._restart(f"HTTP {response.status_code} to bytes {start} to {stop}")

    def _restart(self, why: str) -> NoReturn:
        self._start()
        raise TransientError(why)

    def _resume(self) -> None:
        """Ask how much has come; an upload that is gone begins anew."""
        with self._registry.answer("GET", self._location, (200, 202, 204, 404)) as response:
            if response.status_code != 404:
                self._location = self._next(response)
                self._move_to(_held(response, 0))
                return
        self._start()

    def _next(self, response: httpx.Response) -> httpx.URL:
        """Where the upload goes on; a registry that is reached by https does not lead to http."""
        location = response.headers.get("location")
        if not location:
            raise TransientError(f"HTTP {response.status_code} without a Location")
        url = response.url.join(location)
        if response.url.scheme == "https" and url.scheme != "https":
            raise TransientError("leads the upload from https to http")
        return url

    def _move_to(self, at: int) -> None:
        self._sent(at - self._at)
        self._at = at

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Bytes of the blob that are sent now, and counted."""
        self._move_to(start)
        for chunk in self._blob.read(start):
            self._registry.require_running()
            wanted = chunk[: stop - self._at]
            self._move_to(self._at + len(wanted))
            self._most = max(self._most, self._at)
            yield wanted
            if self._at >= stop:
                return


class _Slice:
    """Content of a request, which httpx reads again where it has to authenticate."""

    def __init__(self, upload: Upload, start: int, stop: int) -> None:
        self._upload, self._start, self._stop = upload, start, stop

    def __iter__(self) -> Iterator[bytes]:
        return self._upload.read(self._start, self._stop)


def _held(response: httpx.Response, default: int) -> int:
    """Bytes that the registry has; ``0-0`` is none, as registries say it."""
    match = _RANGE.fullmatch(response.headers.get("range", ""))
    if match is None:
        return default
    return int(match[1]) + 1 if int(match[1]) else 0
