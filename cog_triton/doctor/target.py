"""What ``doctor`` is asked of: an image, an engine or a model, told by its small files alone."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cog_triton.artifact import engine_manifest
from cog_triton.artifact.engine_config import CONFIG_NAME, CPU_FAMILIES
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, SEALED_ENGINE
from cog_triton.doctor import engine_check
from cog_triton.download import url_download
from cog_triton.download.model_request import is_hub_id
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.errors import BuildConfigInvalid, EngineCorrupt, ModelUnavailable
from cog_triton.inspection import registry_contents
from cog_triton.inspection.engine_contents import no_engine
from cog_triton.oci import small_files
from cog_triton.oci.reference import Reference, is_oci
from cog_triton.settings import Settings
from cog_triton.sizing import model_files
from cog_triton.sizing.memory_sum import AS_STORED, Precision
from cog_triton.sizing.model_files import ModelFiles, describe
from cog_triton.system.paths import expanded

_HEAD = 32 << 20
_STORES = ("/var/lib/containerd", "/var/lib/docker", "/var/lib/containers")
COMPAT = "_CUDA_COMPAT_PATH"
"""Variable of images that carry CUDA's forward compatibility package."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to run on this machine; None is what nothing tells of.

    Attributes:
        sm: as COG_TRITON_SM.
        gpus: number of GPUs of an engine; None for a model, which is fitted.
        files: its weights and shape; `unknown` says why there are none.
        pull, unpacked: bytes that are still to come, into `place`.
    """

    name: str
    what: str
    sm: str | None = None
    cuda: str | None = None
    compat: bool = False
    gpus: int | None = None
    precision: Precision | None = None
    files: ModelFiles | None = None
    unknown: str = ""
    pull: int = 0
    unpacked: int | None = 0
    place: Path

    @property
    def on_cpu(self) -> bool:
        """Whether it asks for no GPU."""
        return self.sm == "cpu"


def of(name: str, settings: Settings, echo: Callable[[str], None]) -> Target:
    """The image, engine or model `name`; nothing large is fetched.

    Raises:
        ModelUnavailable: it cannot be had.
        EngineCorrupt: it is something else, or its manifest breaks a rule.
    """
    work, plain = settings.work_dir, settings.plain_http_registries
    if not name.strip():
        raise ModelUnavailable(f"{name!r}: is no name: an image, an engine or a model")
    if is_oci(name):
        contents = registry_contents.read(Reference.parse(name), echo, plain_http=plain)
        sizes = {file: entry.size for file, entry in contents.files.items()}
        return _engine(name, sizes, contents.texts, sum(sizes.values()), work)
    if "://" in name and (local := url_download.local_path(name)) is None:
        head, size = url_download.head(name, _HEAD)
        with tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
            path = Path(scratch, "head.tar")
            path.write_bytes(head)
            sizes, texts = engine_check.small_texts(path, cut=True)
        return _engine(url_download.redacted_name(name), sizes, texts, size, work)
    path = local if "://" in name and local else expanded(name)
    if path.is_file():
        sizes, texts = engine_check.small_texts(path)
        return _engine(name, sizes, texts, 0, work)
    if path.is_dir() and (path / MANIFEST_NAME).exists():
        sizes = {
            file: found.stat().st_size for file, found in engine_manifest.files_of(path).items()
        }
        texts = {file: (path / file).read_bytes() for file in engine_check.SMALL if file in sizes}
        return _engine(name, sizes, texts, 0, work, here=True)
    if path.is_dir() and VLLMFamily.matches(path):
        return _vllm(name, VLLMFamily.open(path), work)
    if path.is_dir() or is_hub_id(name):
        files = describe(name)
        pull = 0 if path.is_dir() else files.weight_bytes
        return Target(name=files.name, what="model", files=files, pull=pull, place=work)
    try:
        reference = Reference.parse(name)
    except ModelUnavailable:
        raise ModelUnavailable(
            f"{name!r}: no such file or directory; must be an image (REGISTRY/NAME:TAG), an"
            " engine.tar (path, URL or oci://REF), an engine directory, or a model (ORG/NAME)"
        ) from None
    return _image(small_files.read_image(reference, echo, plain_http=plain))


def _vllm(name: str, family: VLLMFamily, work: Path) -> Target:
    """A directory for vLLM, as a start compares it."""
    target = Target(name=name, what="engine", gpus=family.gpus or 1, place=work)
    try:
        demand = family.memory()
    except (BuildConfigInvalid, ModelUnavailable) as error:
        return dataclasses.replace(target, unknown=error.detail)
    return dataclasses.replace(
        target, gpus=demand.gpus, files=demand.files, precision=demand.precision
    )


def _image(facts: small_files.ImageFacts) -> Target:
    sm = facts.labels.get("cog-triton.sm") or facts.environment.get("COG_TRITON_SM")
    place = next(filter(Path.exists, map(Path, _STORES)), Path("/var/lib"))
    return Target(
        name=str(facts.reference).removeprefix("oci://"),
        what="image",
        sm=None if sm == "any" else sm,
        cuda=facts.labels.get("cog-triton.cuda") or facts.environment.get("CUDA_VERSION"),
        compat=COMPAT in facts.environment,
        unknown="an image tells of no model: ask for the engine or the model, too",
        pull=facts.compressed,
        unpacked=facts.unpacked,
        place=place,
    )


def _engine(
    name: str,
    sizes: Mapping[str, int],
    texts: Mapping[str, bytes],
    pull: int | None,
    work: Path,
    here: bool = False,
) -> Target:
    if MANIFEST_NAME not in texts:
        if CONFIG_NAME in texts:
            why = f"an engine without {MANIFEST_NAME}: what it needs is not recorded"
            size = sum(sizes.values())
            return Target(name=name, what="engine", unknown=why, unpacked=size, place=work)
        raise EngineCorrupt(no_engine(Path(name), sizes))
    manifest = engine_manifest.parse(texts[MANIFEST_NAME], f"{name}: {MANIFEST_NAME}")
    held = {file: entry.size for file, entry in manifest.files.items()}
    elsewhere = manifest.weights.files if manifest.weights else {}  # which a start fetches
    referenced = sum(entry.size for entry in elsewhere.values())
    held |= {file: entry.size for file, entry in elsewhere.items()}
    cpu = manifest.engine in CPU_FAMILIES
    sms = [] if manifest.engine == SEALED_ENGINE else manifest.sm  # it compiles for others
    files, precision, unknown = None, AS_STORED, "it is for the CPU"
    if not cpu:
        try:
            files, precision = model_files.of_engine(
                name, texts.get(CONFIG_NAME), held, manifest.max_seq_len
            )
        except (BuildConfigInvalid, ModelUnavailable) as error:
            unknown = error.detail
    return Target(
        name=name,
        what="engine",
        sm="cpu" if cpu else ",".join(map(str, sms)) or None,
        cuda=manifest.versions.get("cuda"),
        gpus=manifest.world_size,
        precision=precision,
        files=files,
        unknown=unknown,
        pull=sum(held.values()) if pull is None else pull + referenced,
        unpacked=0 if here else sum(held.values()),
        place=work,
    )
