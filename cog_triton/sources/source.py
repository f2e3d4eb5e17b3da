"""What a user names: an engine or a model, of a directory, a tar, a URL, a registry or the hub.

`Source.open` finds which of them it is, by the files of this machine alone. `files` and `read` then
ask wherever it is for what describes it, and never for its weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ValidationError

from cog_triton.artifact import engine_manifest, tar_members
from cog_triton.artifact.engine_config import CONFIG_NAME, TENSORRT_LLM
from cog_triton.artifact.engine_manifest import BUILD_CONFIG, MANIFEST_NAME, MAX_TEXT, File
from cog_triton.artifact.engine_tar import Checksum, hashing
from cog_triton.download.model_request import ModelRequest, resolve
from cog_triton.download.retry import RetryPolicy
from cog_triton.errors import EngineCorrupt, ModelUnavailable, nearest
from cog_triton.oci import image_manifest
from cog_triton.oci.image_manifest import Descriptor, Digest
from cog_triton.oci.reference import Reference, is_oci
from cog_triton.system.paths import expanded
from cog_triton.system.printable import first_problem, printable, shortened
from cog_triton.system.redaction import redact_address

if TYPE_CHECKING:
    from cog_triton.download.hub_cache import Listing
    from cog_triton.oci.registry_client import Registry

ACCEPTED = (
    "name an engine.tar, its URL, oci://REF, an engine directory, a Hugging Face model (ORG/NAME),"
    " a directory of safetensors, or a .gguf file"
)
MAX_LAYER = 16 << 20
"""Most bytes of a layer that is fetched for a small file, as it is sent and as it is unpacked."""
_HEAD = 32 << 20
_GENERATION = "generation_config.json"
_TEXTS = (MANIFEST_NAME, CONFIG_NAME, _GENERATION)
# Files that only engines of one family have, and those that name theirs.
_MARKS = {"openvino_model.xml": "openvino", "model.json": "vllm", "mock.json": "mock"}
_NAMING = (*_MARKS, BUILD_CONFIG, MANIFEST_NAME, CONFIG_NAME)
_SEALED = re.compile(rb"^engine: vllm$", re.MULTILINE)
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@([\w][\w./-]*))?")
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.zst")
_FILES = (*_TARS, ".gguf", ".yaml", ".yml", ".json", ".safetensors")
_GGUF, _USTAR, _USTAR_AT = b"GGUF", b"ustar", 257
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # gzip, zstd
_LAYER = "application/vnd.oci.image.layer.v1"
_PLATFORM = {"os": "linux", "architecture": "amd64"}


@dataclass(frozen=True)
class Network:
    """How registries and the hub are reached; `echo` gets the lines of retries."""

    echo: Callable[[str], None] = lambda _line: None
    plain_http: Collection[str] = ()
    retry: RetryPolicy = RetryPolicy()  # noqa: RUF009


class Source(ABC):
    """An engine or a model.

    Attributes:
        kind: directory, tar, url, registry, hub, file (a GGUF), package, image.
        name: as errors call it, without secrets.
        path: of what is on this machine.
        digest: of a registry's manifest, or the hub's commit, once its files were asked for.
        whole: whether `files` are all of it; the beginning of a large tar has some.
        remark: what the name might have meant besides.
    """

    kind: ClassVar[str]
    is_engine = False
    path: Path | None = None
    digest: str | None = None
    compression: Literal["gzip", "zstd"] | None = None
    whole = True
    remark: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def open(text: str, network: Network = Network(), *, images: bool = False) -> Source:
        """What `text` names; what is on this machine goes first.

        Args:
            images: whether it may be a container image, REGISTRY/NAME:TAG, too.

        Raises:
            ModelUnavailable: it is not here, or is something else; says what, and what to do.
            EngineCorrupt: a directory that is neither an engine nor a model.
        """
        if text.startswith("pypi:"):
            return Package(text)
        if is_oci(text):
            return InRegistry(Reference.parse(text), network)
        hub, path = _HUB.fullmatch(text), expanded(text)
        if "://" in text:
            from cog_triton.download.url_download import local_path

            if (local := local_path(text)) is None:
                return URL(text)
            hub, path = None, local
        there = False
        with contextlib.suppress(OSError, ValueError):  # too long, or with a NUL
            there = bool(text.strip()) and path.exists()
        if there:
            try:
                found = _directory(text, path) if path.is_dir() else _file(text, path)
            except OSError as error:
                raise ModelUnavailable(f"{text!r} cannot be read: {error.strerror}") from None
            if hub is not None and not hub[2]:
                found.remark = f"{text} is here, so it is not the hub's; that one is {text}@main"
            return found
        if hub is not None and not hub[1].endswith(_FILES):
            return OnHub(hub[1], hub[2], network)
        if images and "/" in text:
            with contextlib.suppress(ModelUnavailable):
                return Image(Reference.parse(text), network)
        raise ModelUnavailable(_absent(text, path))

    @abstractmethod
    def files(self, *, checksums: bool = False) -> Mapping[str, File]:
        """Its files by name; with `checksums` those that are here are read for their SHA-256.

        Raises:
            ModelUnavailable: it cannot be had.
            EngineCorrupt: it is damaged, or nothing that can be served.
        """

    def read(self, name: str) -> bytes | None:
        """The manifest, config.json or generation_config.json; None if there is none.

        Raises as `files`, and EngineCorrupt if it has over `MAX_TEXT` bytes.
        """
        return None

    def family(self) -> str | None:
        """The family of an engine on this machine by the files before its weights, if they say."""
        return None


class Directory(Source):
    """A directory: an engine of any family, or a model with a config.json."""

    kind = "directory"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self.path: Path = path
        self.is_engine = self.family() is not None

    def files(self, *, checksums: bool = False) -> Mapping[str, File]:
        sum_of = engine_manifest.sha256_of if checksums else lambda _path: None
        try:
            found = engine_manifest.files_of(self.path).items()
            return {name: File(path.stat().st_size, sum_of(path)) for name, path in found}
        except OSError as error:
            raise EngineCorrupt(f"{error.filename}: cannot be read: {error.strerror}") from error

    def read(self, name: str) -> bytes | None:
        try:
            with (self.path / name).open("rb") as file:
                text = file.read(MAX_TEXT + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EngineCorrupt(f"{self.path / name}: cannot be read: {error.strerror}") from error
        if len(text) > MAX_TEXT:
            raise EngineCorrupt(f"{self.name}: {name} has over {MAX_TEXT} bytes")
        return text

    def family(self) -> str | None:
        texts = ((name, self.read(name)) for name in _NAMING if (self.path / name).is_file())
        return next(filter(None, (_family(name, text or b"") for name, text in texts)), None)


class Tar(Source):
    """A tar of an engine, compressed or not, that is read front to back."""

    kind = "tar"
    is_engine = True

    def __init__(self, name: str, path: Path | None = None) -> None:
        super().__init__(name)
        self.path = path
        self._summed = False
        self._files: dict[str, File] | None = None
        self._texts: dict[str, bytes] = {}

    def files(self, *, checksums: bool = False) -> Mapping[str, File]:
        if self._files is None or (checksums and not self._summed):
            self._files, self._summed = {}, checksums
            self._scan(self._files, checksums)
            self._files = dict(sorted(self._files.items()))
        return self._files

    def _scan(self, found: dict[str, File], checksums: bool) -> None:
        assert self.path is not None
        with tar_members.coded_errors(self.path):
            form = tar_members.by_content(self.path)
        self.compression = None if form == "tar" else form
        with hashing() as checksum:
            for member in tar_members.read(self.path):
                if member.content is not None:
                    found[member.name] = File(member.size)
                    if checksums or member.name in _TEXTS:
                        found[member.name] = self._sum(member.name, member.content, checksum())

    def _sum(self, name: str, content: tar_members.Readable, sums: Checksum) -> File:
        kept = bytearray()
        while piece := sums.read(content):
            if name in _TEXTS:
                kept += piece
                if len(kept) > MAX_TEXT:
                    raise EngineCorrupt(f"{self.name}: {name} has over {MAX_TEXT} bytes")
        if name in _TEXTS:
            self._texts[name] = bytes(kept)
        entry = sums.entry()
        return File(entry.size, entry.sha256)

    def read(self, name: str) -> bytes | None:
        self.files()
        return self._texts.get(name)

    def family(self) -> str | None:
        for member in tar_members.read(self.path) if self.path else ():
            if member.name in _NAMING and member.content is not None:
                found = _family(member.name, member.content.read(MAX_TEXT) or b"")
                if found or member.name == CONFIG_NAME:
                    return found
        return None


class URL(Tar):
    """A tar behind a URL, of which the first 32 MiB are read."""

    kind = "url"

    def __init__(self, url: str) -> None:
        from cog_triton.download.url_download import redacted_name

        super().__init__(redacted_name(url))
        self.url, self.size = url, 0

    def _scan(self, found: dict[str, File], checksums: bool) -> None:
        from cog_triton.download import url_download

        head, size = url_download.head(self.url, _HEAD)
        self.size = size or len(head)
        self.whole = size == len(head) or len(head) < _HEAD
        with tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
            self.path = Path(scratch, "head.tar")
            self.path.write_bytes(head)
            try:
                super()._scan(found, checksums and self.whole)
            except EngineCorrupt as error:
                if self.whole or not found:
                    why = error.detail.replace(str(self.path), self.name)
                    raise EngineCorrupt(why) from None
            finally:
                self.path = None


Layers = Sequence[tuple[str | None, Descriptor]]
"""Layers, each with the name of a file in it; None for what is not said to be in it."""


class InRegistry(Source):
    """An engine in a registry: its manifest and config.json are fetched, and nothing else."""

    kind = "registry"
    is_engine = True

    def __init__(self, reference: Reference, network: Network) -> None:
        super().__init__(str(reference))
        self.reference, self._network = reference, network

    @cached_property
    def _texts(self) -> Mapping[str, bytes]:
        contents: dict[str, bytes] = {}
        with _registry(self.reference, self._network) as (registry, scratch):
            digest, body = registry.manifest()
            image = image_manifest.parse(body, self.name)
            layers: Layers = [(layer.title, layer) for layer in image.layers]
            if image.config is not None and image.config.mediaType == image_manifest.COG_CONFIG:
                config = _fetched(image.config, registry, scratch).read_bytes()
                layers = self._listed(config, image.layers)
            for layer in self._wanted(layers):
                contents |= self._members(_fetched(layer, registry, scratch), layer.digest)
        self.digest, self.name = digest, str(self.reference.pinned(digest))
        held = [name for name, _ in layers if name is not None]
        self._held = held if len(held) == len(layers) else None
        if MANIFEST_NAME not in contents:
            raise EngineCorrupt(
                f"{self.name}: no small layer of it has {MANIFEST_NAME}, so what it is cannot be"
                " known before it is pulled; cog-triton push gives each file a layer"
            )
        return contents

    def files(self, *, checksums: bool = False) -> Mapping[str, File]:
        texts = self._texts
        manifest = engine_manifest.parse(texts[MANIFEST_NAME], f"{self.name}: {MANIFEST_NAME}")
        found = {
            name: File(entry.size, entry.sha256)
            for name, entry in manifest.files.items()
            if self._held is None or name in self._held
        }
        for name, text in texts.items():
            found[name] = File(len(text), hashlib.sha256(text).hexdigest())
        return dict(sorted(found.items()))

    def read(self, name: str) -> bytes | None:
        return self._texts.get(name)

    def _listed(self, config: bytes, layers: Sequence[Descriptor]) -> Layers:
        """The layers of the files that the config of a Cog weight names."""
        known = {layer.digest: layer for layer in layers}
        try:
            files = json.loads(config)["files"]
            return [(str(file["path"]), known[file["layer"]]) for file in files]
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            why = f"its config is not Cog's: {shortened(error)}"
            raise EngineCorrupt(f"{self.name}: {why}") from None

    def _wanted(self, layers: Layers) -> Iterable[Descriptor]:
        """Layers of the texts, else the smallest ones that have no title."""
        silent = sorted((one for said, one in layers if said is None), key=lambda one: one.size)
        sizes = itertools.accumulate(one.size for one in silent)
        small = [one for one, size in zip(silent, sizes, strict=True) if size <= MAX_LAYER]
        found: dict[str, Descriptor] = {}
        for name in (MANIFEST_NAME, CONFIG_NAME):
            its = [layer for said, layer in layers if said == name]
            if len(its) > 1:
                raise EngineCorrupt(f"{self.name}: {name} is in two of its layers")
            found |= {layer.digest: layer for layer in its or small}
        return found.values()

    def _members(self, blob: Path, digest: str) -> dict[str, bytes]:
        found, size = {}, 0
        try:
            for member in tar_members.read(blob):
                size += member.size
                if size > MAX_LAYER:  # before any of it is unpacked
                    raise EngineCorrupt(f"has over {MAX_LAYER} bytes in it")
                if member.name in _TEXTS and member.content is not None:
                    found[member.name] = member.content.read()
        except EngineCorrupt as error:
            why = error.detail.removeprefix(f"{blob}: ")
            raise EngineCorrupt(f"{self.name}: layer {digest}: {why}") from None
        return found


@contextlib.contextmanager
def _registry(reference: Reference, network: Network) -> Iterator[tuple[Registry, Path]]:
    from cog_triton.oci.registry_client import Registry

    stop = threading.Event()
    opened = Registry(reference, network.echo, network.retry, stop, plain_http=network.plain_http)
    with opened, tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
        yield opened, Path(scratch)


def _fetched(blob: Descriptor, registry: Registry, scratch: Path) -> Path:
    from cog_triton.download.transfer_progress import Progress

    name = f"{registry.reference}: {blob.digest}"
    if blob.size > MAX_LAYER:
        raise EngineCorrupt(f"{name} has {blob.size} bytes; must be at most {MAX_LAYER}")
    target = scratch / blob.digest.removeprefix("sha256:")
    with Progress(name, lambda _: None, blob.size) as progress:
        return registry.fetch_blob(blob, target, progress, registry.stop)


class _Container(BaseModel):
    Labels: dict[str, str] | None = None
    Env: list[str] | None = None


class _ImageConfig(BaseModel):
    config: _Container = _Container()


class _IndexEntry(BaseModel):
    digest: Digest
    platform: dict[str, Any] | None = None


class _Index(BaseModel):
    manifests: list[_IndexEntry] | None = None


class Image(Source):
    """A container image, of an index that for linux/amd64: its labels and environment."""

    kind = "image"

    def __init__(self, reference: Reference, network: Network) -> None:
        super().__init__(str(reference).removeprefix("oci://"))
        self._reference, self._network = reference, network

    @property
    def labels(self) -> Mapping[str, str]:
        return self._read[0].Labels or {}

    @property
    def environment(self) -> Mapping[str, str]:
        return dict(line.partition("=")[::2] for line in self._read[0].Env or ())

    @property
    def unpacked(self) -> int | None:
        """Bytes of its files; None where layers are compressed, as nothing says what they hold."""
        plain = all(layer.mediaType == f"{_LAYER}.tar" for layer in self._read[1])
        return sum(layer.size for layer in self._read[1]) if plain else None

    def files(self, *, checksums: bool = False) -> Mapping[str, File]:
        """Its layers by digest."""
        return {f"{n} {one.digest}": File(one.size) for n, one in enumerate(self._read[1])}

    @cached_property
    def _read(self) -> tuple[_Container, Sequence[Descriptor]]:
        with _registry(self._reference, self._network) as (registry, scratch):
            self.digest, body = registry.manifest()
            try:
                entries = _Index.model_validate_json(body).manifests
                if entries is not None:
                    chosen = self._for_platform(entries)
                    return Image(self._reference.pinned(chosen), self._network)._read
                image = image_manifest.Image.model_validate_json(body)
                if image.config is None:
                    raise EngineCorrupt(f"{self.name}: has no config")
                text = _fetched(image.config, registry, scratch).read_bytes()
                return _ImageConfig.model_validate_json(text).config, image.layers
            except ValidationError as error:
                raise EngineCorrupt(f"{self.name}: is no image: {first_problem(error)}") from None

    def _for_platform(self, entries: Sequence[_IndexEntry]) -> str:
        for entry in entries:
            if _PLATFORM.items() <= (entry.platform or {}).items():
                return entry.digest
        raise EngineCorrupt(f"{self.name}: its index has no image for linux/amd64")


class OnHub(Source):
    """A model on the Hugging Face hub, at the commit that its revision is at now."""

    kind = "hub"

    def __init__(self, model_id: str, revision: str | None, network: Network) -> None:
        super().__init__(model_id)
        self.model_id, self.revision, self._network = model_id, revision, network

    def at(self, revision: str | None) -> OnHub:
        """The same model at another revision."""
        return OnHub(self.model_id, revision, self._network)

    @cached_property
    def listing(self) -> Listing:
        """Every file of the repository, or the chosen ones of a commit that is in the cache."""
        from cog_triton.download import hub, hub_cache

        asked = ModelRequest(self.model_id, revision=self.revision)
        found = None
        if hub_cache.is_commit(self.revision):
            found = hub_cache.cached_listing(asked)
        if found is None:
            network, stop = self._network, threading.Event()
            found = hub.contents(asked, network.echo, network.retry, stop)
        self.digest = found.commit
        return found

    def files(self, *, checksums: bool = False) -> Mapping[str, File]:
        return self.listing.files

    @cached_property
    def _texts(self) -> Mapping[str, bytes]:
        from cog_triton.download.model_source import fetch_model

        held = self.files()
        names = [name for name in _TEXTS if name in held and held[name].size <= MAX_TEXT]
        if not names:
            return {}
        asked = ModelRequest(self.model_id, revision=self.digest, files=tuple(names))
        with tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
            view = fetch_model(
                asked, Path(scratch), self._network.echo, retry=self._network.retry
            ).path
            return {name: (view / name).read_bytes() for name in names}

    def read(self, name: str) -> bytes | None:
        return self._texts.get(name)


class GGUF(Source):
    """A .gguf file."""

    kind = "file"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self.path: Path = path

    def files(self, *, checksums: bool = False) -> Mapping[str, File]:
        sha256 = engine_manifest.sha256_of(self.path) if checksums else None
        return {self.path.name: File(self.path.stat().st_size, sha256)}


class Package(Source):
    """The model in an installed package, ``pypi:NAME==VERSION``."""

    kind = "package"

    @cached_property
    def model(self) -> Source:
        """The model itself; raises ModelUnavailable unless the package is installed."""
        path = resolve(self.name)
        return Directory(self.name, path) if path.is_dir() else GGUF(self.name, path)

    def files(self, *, checksums: bool = False) -> Mapping[str, File]:
        return self.model.files(checksums=checksums)

    def read(self, name: str) -> bytes | None:
        return self.model.read(name)


def no_engine(source: Source) -> str:
    """Error text: `source` has neither manifest nor config.json, but these files."""
    return (
        f"{source.name}: not an engine: neither {MANIFEST_NAME} nor {CONFIG_NAME} at its top;"
        f" it holds {_shown(source.files())}"
    )


def _shown(names: Iterable[str]) -> str:
    held = sorted(map(printable, names))
    return (", ".join(held[:8]) or "nothing") + (f" and {len(held) - 8} more" if held[8:] else "")


def _family(name: str, text: bytes) -> str | None:
    """The family that a file of an engine names."""
    if name in _MARKS:
        return _MARKS[name]
    if name == BUILD_CONFIG:
        return "vllm" if _SEALED.search(text) else None
    try:
        value = json.loads(text)
        its = value.get("engine", {*value} & {"builder_config", "build_config"} and TENSORRT_LLM)
    except (ValueError, RecursionError, AttributeError):
        return None
    return its if isinstance(its, str) else None


def _directory(text: str, path: Path) -> Source:
    found = Directory(text, path)
    if found.is_engine or (path / MANIFEST_NAME).is_file():
        found.is_engine = True
        return found
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and not any(path.glob("*.safetensors")):
        return GGUF(text, ggufs[0])
    if (path / CONFIG_NAME).is_file():
        return found
    hint = f" ({len(ggufs)} .gguf files: name one)" if ggufs else ""
    raise EngineCorrupt(
        f"{text!r} is a directory with neither an engine nor a model{hint}; it holds"
        f" {_shown(file.name for file in path.iterdir())}; {ACCEPTED}"
    )


def _file(text: str, path: Path) -> Source:
    if not path.is_file():
        raise EngineCorrupt(f"{text!r}: must be a file or a directory, is neither")
    with path.open("rb") as file:
        start = file.read(512)
    if start.startswith(_GGUF):
        return GGUF(text, path)
    if path.name.endswith(_TARS) or start.startswith(_COMPRESSED):
        return Tar(text, path)
    if start[_USTAR_AT:].startswith(_USTAR):
        return Tar(text, path)
    what = f"a file, but neither a tar nor a GGUF; {ACCEPTED}"
    if path.suffix == ".safetensors":
        what = "a file of weights: name its directory, with config.json and tokenizer.json"
    if path.suffix in (".yaml", ".yml"):
        what = "a config: cog-triton build CONFIG builds an engine, serve --config CONFIG serves it"
    raise ModelUnavailable(f"{text!r} is {what}")


def _absent(text: str, path: Path) -> str:
    try:
        names = [other.name for other in path.absolute().parent.iterdir()]
    except (OSError, ValueError):
        names = []
    close = nearest(path.name, names)
    # The hub's oldest models were called by one word.
    word = re.fullmatch(r"[A-Za-z0-9][\w.-]*", text) and not text.endswith(_FILES)
    org = "; a Hugging Face model is ORG/NAME" if word and not close else ""
    return f"{redact_address(text)!r}: no such file or directory{close}{org}; {ACCEPTED}"
