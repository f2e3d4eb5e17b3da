"""Push of an engine to a registry; what is there already is not sent again."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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

_OCTETS = "application/octet-stream"
_UPLOADS = 3
_SHOWN = 5
_WEIGHT = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
Form = Callable[[Sequence[LayerFiles], EngineFiles], Made]


@dataclass(frozen=True)
class Blob:
    """What is sent; `read` gives its bytes from the start, again after a failure."""

    digest: str
    size: int
    read: Callable[[], Iterable[bytes]]


class Upload:
    """Upload of `blob` through `registry`; its iterator is the content of the request.

    Args:
        source: repository of the same registry to mount it from, if it is there.
        sent: called with the bytes sent; a negative number takes back.
    """

    def __init__(
        self, registry: Registry, blob: Blob, source: str | None, sent: Callable[[int], None]
    ) -> None:
        self._registry = registry
        self._blob = blob
        self._source = source
        self._sent = sent
        self._at = self._most = 0

    def run(self) -> bool:
        """Send the blob; False if the registry has it, in this repository or another."""
        return self._registry.retried(self._send, lambda: self._most)

    def _send(self) -> bool:
        """One attempt, from the blob's start."""
        self._take_back()
        url = f"{self._registry.url}/blobs/{self._blob.digest}"
        with self._registry.answer("HEAD", url, (200, 404)) as response:
            if response.status_code == 200:
                return False
        # Without a repository to mount from, a registry may look in all of them.
        query = {"mount": self._blob.digest, **({"from": self._source} if self._source else {})}
        url = f"{self._registry.url}/blobs/uploads/"
        with self._registry.answer("POST", url, (201, 202), params=query) as response:
            if response.status_code == 201:
                return False
            place = _place(response).copy_merge_params({"digest": self._blob.digest})
        headers = {"Content-Length": str(self._blob.size), "Content-Type": _OCTETS}
        # 404 is an upload that the registry has forgotten: the next attempt begins another.
        with self._registry.answer(
            "PUT", place, (201, 204, 404), content=self, headers=headers
        ) as response:
            if response.status_code == 404:
                raise TransientError("the upload has gone")
        return True

    def _take_back(self) -> None:
        self._sent(-self._at)
        self._at = 0

    def __iter__(self) -> Iterator[bytes]:
        """Bytes of the blob, counted; httpx reads them again if it has to authenticate."""
        self._take_back()
        for chunk in self._blob.read():
            self._sent(len(chunk))
            self._at += len(chunk)
            self._most = max(self._most, self._at)
            yield chunk


def _place(response: httpx.Response) -> httpx.URL:
    """URL of the upload; a registry that is reached by https does not lead to http."""
    location = response.headers.get("location")
    if not location:
        raise TransientError(f"HTTP {response.status_code} without a Location")
    url = response.url.join(location)
    if response.url.scheme == "https" and url.scheme != "https":
        raise TransientError("leads the upload from https to http")
    return url


@dataclass(frozen=True)
class Pushed:
    """The reference with the digest of what was pushed, and how many bytes of it were sent."""

    reference: Reference
    sent: int
    total: int


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
        stop: ends it from another thread; blobs that were sent whole stay in the registry.
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
    digest = image_manifest.digest_of(made.config)
    todo = [Blob(digest, len(made.config), lambda: [made.config])]
    todo += [Blob(one.digest, one.size, blob.read) for one, blob in zip(layers, blobs, strict=True)]
    total = sum(blob.size for blob in todo)
    name = str(registry.reference)
    there: list[int] = []
    with Progress(name, echo, total, tag="push") as progress:

        def sent(count: int) -> None:
            registry.require_running()
            (progress.advance if count > 0 else progress.skip)(count)

        def work(blob: Blob) -> None:
            if not Upload(registry, blob, mount_from, sent).run():
                progress.skip(blob.size)
                there.append(blob.size)

        in_parallel(todo, work, _UPLOADS, registry.halt, registry.require_not_stopped)
        registry.halt.clear()
        registry.put_manifest(made.manifest)
    if there:
        echo(f"[push] {name}: {len(there)} of {len(todo)} blobs are there, {size_text(sum(there))}")
    return Pushed(registry.reference.pinned(made.digest), total - sum(there), total)
