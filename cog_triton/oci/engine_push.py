"""Push of an engine to a registry: what is there already is not sent again."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cog_triton.download.parallel import in_parallel
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo, Progress, size_text
from cog_triton.errors import BuildCancelled, InvalidArgument, PushFailed
from cog_triton.oci import image_manifest
from cog_triton.oci.blob_upload import Blob, Upload
from cog_triton.oci.engine_files import EngineFiles, opened
from cog_triton.oci.image_manifest import LayerFiles, Made
from cog_triton.oci.layer_blobs import LayerBlob, layers_of
from cog_triton.oci.reference import Reference
from cog_triton.oci.registry_client import Registry
from cog_triton.system.printable import printable

_UPLOADS = 3
_SHOWN = 5
_WEIGHT = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
Form = Callable[[Sequence[LayerFiles], EngineFiles], Made]


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
