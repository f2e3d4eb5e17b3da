"""Push of an engine to a registry; what is there already is not sent again."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import httpx

from cog_triton.artifact import engine_tar
from cog_triton.download.retry import RetryPolicy, TransientError
from cog_triton.download.transfer_progress import Echo, Progress, size_text
from cog_triton.download.url_download import in_parallel
from cog_triton.errors import BuildCancelled, EngineCorrupt, InvalidArgument, PushFailed
from cog_triton.oci import image_manifest
from cog_triton.oci.image_manifest import LayerFiles, Made, digest_of
from cog_triton.oci.layer_blobs import LayerBlob, layers_of, opened
from cog_triton.oci.reference import Reference
from cog_triton.oci.registry_client import Registry
from cog_triton.system.printable import printable

_OCTETS = "application/octet-stream"
_UPLOADS = 3
_SHOWN = 5
_WEIGHT = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")


class Upload:
    """A blob that is sent; its iterator is the content of the request.

    Args:
        read: gives its bytes from the start, again after a failure.
        sent: called with the bytes sent; a negative number takes back.
    """

    def __init__(
        self,
        digest: str,
        size: int,
        read: Callable[[], Iterable[bytes]],
        sent: Callable[[int], None],
    ) -> None:
        self.digest, self.size = digest, size
        self._read, self._sent = read, sent
        self._at = self.most = 0

    def send(self, registry: Registry, source: str | None) -> bool:
        """One attempt; False if the registry has it, in this repository or in `source`."""
        self._take_back()
        with registry.answer("HEAD", f"/blobs/{self.digest}", (200, 404)) as response:
            if response.status_code == 200:
                return False
        # Without a repository to mount from, a registry may look in all of them.
        query = {"mount": self.digest, **({"from": source} if source else {})}
        with registry.answer("POST", "/blobs/uploads/", (201, 202), params=query) as response:
            if response.status_code == 201:
                return False
            place = _place(response).copy_merge_params({"digest": self.digest})
        headers = {"Content-Length": str(self.size), "Content-Type": _OCTETS}
        # 404 is an upload that the registry has forgotten: the next attempt begins another.
        with registry.answer(
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
        for chunk in self._read():
            self._sent(len(chunk))
            self._at += len(chunk)
            self.most = max(self.most, self._at)
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


def push(
    reference: Reference,
    engine: Path,
    scratch: Path,
    echo: Echo,
    stop: threading.Event,
    *,
    cog_weight: tuple[str, str] | None = None,
    mount_from: str | None = None,
    plain_http: Collection[str] = (),
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
) -> Pushed:
    """Push the engine.tar or engine directory `engine` to `reference`.

    Every file is read and compared with the engine's manifest before anything is sent.

    Args:
        scratch: directory that a compressed tar is unpacked into meanwhile.
        stop: ends it from another thread; blobs that were sent whole stay in the registry.
        cog_weight: name of a managed weight of Cog and the absolute path where it is mounted; the
            form is then Cog's, else that of an image.
        mount_from: repository of the same registry whose blobs may be used.
        plain_http: registries that are reached without TLS.

    Raises:
        InvalidArgument: the reference has a digest, `cog_weight` is none, or the registry refuses;
            says why.
        EngineCorrupt: the engine is damaged, or has a file that no layer can hold.
        PushFailed: too many failures in a row.
        BuildCancelled: `stop` was set.
    """
    if reference.digest is not None:
        raise InvalidArgument(f"{reference}: what is pushed gets its digest; name a tag alone")
    if cog_weight is not None:
        name, target = cog_weight
        if not _WEIGHT.fullmatch(name):
            raise InvalidArgument(f"--cog-weight {name!r}: must be a word of a-z, 0-9, . _ and -")
        if not PurePosixPath(target).is_absolute() or ".." in PurePosixPath(target).parts:
            raise InvalidArgument(f"--target {target!r}: must be an absolute path")
    with opened(engine, scratch) as found:
        if found.left_out:
            names = ", ".join(map(printable, found.left_out[:_SHOWN]))
            echo(f"[push] left out, as the manifest does not name it: {names}")
        if found.manifest is None:
            echo(f"[push] {engine.name}: no manifest, so what it is for will not be known")
        blobs = layers_of(found.files)
        total = sum(span.size for span in found.files.values())
        with Progress(f"reading {engine.name}", echo, total, tag="push") as progress:

            def count(size: int) -> None:
                _require_running(stop)
                progress.advance(size)

            layers = [blob.describe(count) for blob in blobs]
        read = {name: entry for layer in layers for name, entry in layer.files.items()}
        for difference in engine_tar.differences(found.manifest, read) if found.manifest else ():
            raise EngineCorrupt(difference)
        if cog_weight is None:
            made = image_manifest.image(layers, found.manifest)
        else:
            made = image_manifest.cog_weight(layers, *cog_weight)
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
            return _send(registry, layers, blobs, made, mount_from)


def _send(
    registry: Registry,
    layers: Sequence[LayerFiles],
    blobs: Sequence[LayerBlob],
    made: Made,
    mount_from: str | None,
) -> Pushed:
    name, halt = str(registry.reference), threading.Event()
    total = len(made.config) + sum(layer.size for layer in layers)
    there: list[int] = []
    with Progress(name, registry.echo, total, tag="push") as progress:

        def sent(count: int) -> None:
            _require_running(halt)
            (progress.advance if count > 0 else progress.skip)(count)

        def work(blob: Upload) -> None:
            backoff = registry.backoff(lambda: blob.most, halt)
            if not backoff.retried(lambda: blob.send(registry, mount_from)):
                progress.skip(blob.size)
                there.append(blob.size)

        config = digest_of(made.config)
        todo = [Upload(config, len(made.config), lambda: [made.config], sent)]
        for layer, blob in zip(layers, blobs, strict=True):
            todo.append(Upload(layer.digest, layer.size, blob.read, sent))
        check = registry.backoff().require_running
        in_parallel(todo, work, _UPLOADS, halt, check)
        registry.put_manifest(made.manifest)
    if there:
        registry.echo(
            f"[push] {name}: {len(there)} of {len(todo)} blobs are there, {size_text(sum(there))}"
        )
    return Pushed(registry.reference.pinned(made.digest), total - sum(there), total)


def _require_running(stop: threading.Event) -> None:
    if stop.is_set():
        raise BuildCancelled("the push was stopped")
