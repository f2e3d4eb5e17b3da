"""Push of an engine to a registry: in chunks, resumed; what is there already is not sent again."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn, Protocol

import httpx

from cog_triton.download.retry import RetryPolicy, TransientError
from cog_triton.download.transfer import in_parallel
from cog_triton.download.transfer_progress import Echo, Progress, size_text
from cog_triton.errors import BuildCancelled, InvalidArgument, PushFailed
from cog_triton.oci import image_manifest
from cog_triton.oci.image_manifest import LayerFiles, Made
from cog_triton.oci.layer_blobs import EngineFiles, LayerBlob, layers_of, opened
from cog_triton.oci.reference import Reference
from cog_triton.oci.registry_client import Registry
from cog_triton.system.printable import printable

CHUNK = 64 << 20
LEAST_CHUNK = 4 << 20
_RANGE = re.compile(r"(?:bytes=)?0-(\d+)")
_OCTETS = "application/octet-stream"
_UPLOADS = 3
_SHOWN = 5
_WEIGHT = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
Form = Callable[[Sequence[LayerFiles], EngineFiles], Made]


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


@dataclass(frozen=True)
class Pushed:
    """The reference with the digest of what was pushed, and how many bytes of it were sent."""

    reference: Reference
    sent: int
    total: int


class _Data:
    """A blob in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, start: int = 0) -> Iterator[bytes]:
        yield self._data[start:]


def as_image(layers: Sequence[LayerFiles], engine: EngineFiles) -> Made:
    """The form that everything which mounts images can mount."""
    return image_manifest.image(layers, engine.manifest)


def as_cog_weight(
    layers: Sequence[LayerFiles], _engine: EngineFiles, *, name: str, target: str
) -> Made:
    """The form of Cog's managed weight `name`, to be mounted at `target`.

    Raises:
        InvalidArgument: no name, or no absolute path.
    """
    if not _WEIGHT.fullmatch(name):
        raise InvalidArgument(f"--cog-weight {name!r}: must be a word of a-z, 0-9, . _ and -")
    if not PurePosixPath(target).is_absolute() or ".." in PurePosixPath(target).parts:
        raise InvalidArgument(f"--target {target!r}: must be an absolute path")
    return image_manifest.cog_weight(layers, name, target)


def push(
    reference: Reference,
    engine: Path,
    scratch: Path,
    echo: Echo,
    stop: threading.Event,
    *,
    form: Form = as_image,
    mount_from: str | None = None,
    plain_http: Collection[str] = (),
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
) -> Pushed:
    """Push the engine.tar or engine directory `engine` to `reference`.

    Every file is read and compared with the engine's manifest before anything is sent.

    Args:
        scratch: directory that a compressed tar is unpacked into meanwhile.
        stop: ends it from another thread; what was sent stays in the registry.
        mount_from: repository of the same registry whose blobs may be used.
        plain_http: registries that are reached without TLS.

    Raises:
        InvalidArgument: the reference has a digest, or the registry refuses; says why.
        EngineCorrupt: the engine is damaged, or has a file that no layer can hold.
        PushFailed: too many failures in a row.
        BuildCancelled: `stop` was set.
    """
    if reference.digest is not None:
        raise InvalidArgument(f"{reference}: what is pushed gets its digest; name a tag alone")
    with opened(engine, scratch) as found:
        if found.left_out:
            names = ", ".join(map(printable, found.left_out[:_SHOWN]))
            echo(f"[push] left out, as the manifest does not name it: {names}")
        if found.manifest is None:
            echo(f"[push] {engine.name}: no manifest, so what it is for will not be known")
        blobs = layers_of(found.files)
        layers = _described(engine.name, blobs, found, echo, stop)
        with Registry(
            reference,
            echo,
            retry,
            stop,
            plain_http=plain_http,
            refused=InvalidArgument,
            failed=PushFailed,
            tag="push",
        ) as registry:
            return _send(registry, layers, blobs, form(layers, found), mount_from, echo)


def _described(
    name: str,
    blobs: Sequence[LayerBlob],
    engine: EngineFiles,
    echo: Echo,
    stop: threading.Event,
) -> list[LayerFiles]:
    """Digests of the layers, once all files are as the manifest says."""
    total = sum(span.size for span in engine.files.values())
    with Progress(f"reading {name}", echo, total, tag="push") as progress:

        def read(count: int) -> None:
            if stop.is_set():
                raise BuildCancelled(f"{name}: stopped")
            progress.advance(count)

        layers = [blob.describe(read) for blob in blobs]
    engine.verify({name: entry for layer in layers for name, entry in layer.files.items()})
    return layers


def _send(
    registry: Registry,
    layers: Sequence[LayerFiles],
    blobs: Sequence[LayerBlob],
    made: Made,
    mount_from: str | None,
    echo: Echo,
) -> Pushed:
    config = _Data(made.config)
    todo: list[tuple[str, Blob]] = [(image_manifest.digest_of(made.config), config)]
    todo += [(layer.digest, blob) for layer, blob in zip(layers, blobs, strict=True)]
    total = sum(blob.size for _, blob in todo)
    name = str(registry.reference)
    there: list[int] = []
    with Progress(name, echo, total, tag="push") as progress:

        def sent(count: int) -> None:
            registry.require_running()
            (progress.advance if count > 0 else progress.skip)(count)

        def work(item: tuple[str, Blob]) -> None:
            digest, blob = item
            if not Upload(registry, digest, blob, mount_from, sent).run():
                progress.skip(blob.size)
                there.append(blob.size)

        in_parallel(todo, work, _UPLOADS, registry.halt, registry.require_not_stopped)
        registry.halt.clear()
        registry.put_manifest(made.manifest)
    if there:
        echo(f"[push] {name}: {len(there)} of {len(todo)} blobs are there, {size_text(sum(there))}")
    return Pushed(registry.reference.pinned(made.digest), total - sum(there), total)
