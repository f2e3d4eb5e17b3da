"""All checks, in the order in which serving needs them: of this machine, and of what is named.

Of an engine, a model or an image no weights are fetched.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cog_triton.artifact import compatibility, cuda_support
from cog_triton.artifact.compatibility import (
    Machine,
    Needs,
    backends_in,
    gpu_problem,
    library_versions,
)
from cog_triton.artifact.engine_config import CONFIG_NAME
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, SEALED_ENGINE
from cog_triton.doctor import machine
from cog_triton.doctor.report import Check, fail, ok, warn
from cog_triton.download.retry import RetryPolicy
from cog_triton.engines.registry import FAMILIES, open_engine
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.engines.vllm.sealed_caches import SealedManifest, checked_pins
from cog_triton.errors import (
    BuildConfigInvalid,
    CogTritonError,
    EngineCorrupt,
    EngineIncompatible,
    ModelUnavailable,
    TritonStartFailed,
)
from cog_triton.inspection.description import describe
from cog_triton.serving.sealed_engine import unsigned
from cog_triton.settings import Settings, load_settings
from cog_triton.sizing import fit, gpu_table, model_files
from cog_triton.sizing.memory_sum import GIB, Precision
from cog_triton.sizing.model_files import ModelFiles
from cog_triton.sources.source import URL, Image, Network, Source
from cog_triton.system import gpus
from cog_triton.system.gpus import visible_gpus
from cog_triton.system.host_memory import host_memory
from cog_triton.system.ports import OPENAI_PORT
from cog_triton.triton import installation
from cog_triton.triton.installation import TritonInstallation
from cog_triton.triton.serve_config import find_serve_config

COMPAT = "_CUDA_COMPAT_PATH"
"""Variable of images that carry CUDA's forward compatibility package."""
_STORES = ("/var/lib/containerd", "/var/lib/docker", "/var/lib/containers")
_GB = 1e9
_SPARE = int(0.5 * _GB)


def run(wanted: str | None, before: str | None = None) -> list[Check]:
    """Check this machine, and `wanted`, else COG_WEIGHTS or ENGINE_DIR if they are local.

    `wanted` is all that `serve` takes. With `before`, which may be an image, too, nothing is
    checked but whether that fits, before it is fetched.
    """
    if before is None:
        with tempfile.TemporaryDirectory() as scratch:
            return list(_checks(wanted, Path(scratch)))
    try:
        settings = load_settings()
    except CogTritonError as error:
        return [fail("settings", error.detail, "correct it in the environment")]
    source = _source(before, settings, images=True)
    if isinstance(source, Check):
        return [source]
    return list(fits(source, settings, _gpus()))


def _source(name: str, settings: Settings, *, images: bool = False) -> Source | Check:
    network = Network(plain_http=settings.plain_http_registries, retry=RetryPolicy(1, 1))
    try:
        return Source.open(name, network, images=images)
    except CogTritonError as error:
        return unknown(None, error)


def _checks(wanted: str | None, scratch: Path) -> Iterator[Check]:
    yield ok("Python", platform.python_version())  # requires-python has the rule
    try:
        own = {} if "OPENAI_PORT" in os.environ else {"openai_port": OPENAI_PORT}
        settings = load_settings(**own)
        find_serve_config(settings.cog_triton_config)
    except CogTritonError as error:
        yield fail("settings", error.detail, "correct it in the environment or the file")
        return
    yield ok("settings", "valid")
    triton = _triton(settings, scratch)
    yield machine.libpython(triton)
    yield machine.tritonserver(triton)
    if isinstance(triton, TritonInstallation):
        yield machine.backends(triton)
    gpus = _gpus()
    yield machine.gpu(settings.cog_triton_sm, gpus)
    here = [] if isinstance(gpus, EngineIncompatible) else gpus
    if here or settings.cog_triton_sm not in (None, "", "cpu"):
        yield machine.cuda_driver(cuda_support.cuda_of_image(), "this image", compat=False)
    named = wanted if wanted is not None else _configured(settings)
    found = None if named is None else _source(named, settings)
    source, checked = (None, found) if isinstance(found, Check) else (found, None)
    needs = None
    if source is not None and source.is_engine:
        held = None
        if isinstance(triton, TritonInstallation):
            found_here = backends_in(triton.backend_directory)
            held = Machine(here, triton.binary, found_here, library_versions())
        needs, checked = engine(source, held)
    ranks = settings.world_size or (needs.world_size if needs else 0)
    yield machine.mpirun(settings, ranks)
    yield machine.memory()
    yield machine.shared_memory(ranks)
    packed = source.path if source is not None and source.kind == "tar" else None
    yield machine.disk(settings.work_dir, packed.stat().st_size if packed else 0)
    yield machine.compiler_caches(settings)
    yield machine.predictions()
    cog = {"PORT": (settings.cog_host, settings.port)}
    yield from machine.free_ports({**cog, **settings.http_ports, **settings.triton_ports})
    if checked is not None:
        yield checked
    if source is not None and needs is not None and (seal := seals(source, settings)):
        yield seal
    if source is not None and not source.is_engine:
        try:
            yield memory(target(source, settings.work_dir))
        except CogTritonError as error:
            yield unknown(source, error)


def _triton(settings: Settings, scratch: Path) -> TritonInstallation | TritonStartFailed:
    try:
        return installation.find_installation(
            scratch, settings.tritonserver, settings.tritonserver_backend_dir
        )
    except TritonStartFailed as error:
        return error


def _gpus() -> list[int] | EngineIncompatible:
    try:
        return visible_gpus()
    except EngineIncompatible as error:
        return error


def _configured(settings: Settings) -> str | None:
    """Engine that the environment names, if it is on this machine."""
    if weights := settings.cog_weights:
        return None if "://" in weights else weights
    return str(settings.engine_dir) if settings.engine_dir.is_dir() else None


@dataclass(kw_only=True)
class Target:
    """What is to run on this machine; None is what nothing says.

    Attributes:
        sm: as COG_TRITON_SM.
        gpus: number of GPUs of an engine; None for a model, which is fitted.
        files: its weights and shape; `unknown` says why there are none.
        pull, unpacked: bytes that are still to come, into `place`.
    """

    name: str
    what: str
    place: Path
    sm: str | None = None
    cuda: str | None = None
    compat: bool = False
    gpus: int | None = None
    precision: Precision | None = None
    files: ModelFiles | None = None
    unknown: str = ""
    pull: int = 0
    unpacked: int | None = 0


def target(source: Source, work: Path) -> Target:
    """The needs of `source`; raises ModelUnavailable, EngineCorrupt or BuildConfigInvalid."""
    if isinstance(source, Image):
        return _image(source)
    if source.is_engine:
        return _engine(source, Target(name=source.name, what="engine", place=work))
    wanted = Target(name=source.name, what="model", place=work)
    if source.kind in ("file", "package") and source.read(CONFIG_NAME) is None:
        wanted.sm, wanted.unknown = "cpu", "a GGUF file is for the CPU"
        return wanted
    wanted.files = model_files.describe(source)
    wanted.pull = wanted.files.weight_bytes if source.kind == "hub" else 0
    return wanted


def _image(source: Image) -> Target:
    labels, environment = source.labels, source.environment
    sm = labels.get("cog-triton.sm") or environment.get("COG_TRITON_SM")
    return Target(
        name=source.name,
        what="image",
        place=next(filter(Path.exists, map(Path, _STORES)), Path("/var/lib")),
        sm=None if sm == "any" else sm,
        cuda=labels.get("cog-triton.cuda") or environment.get("CUDA_VERSION"),
        compat=COMPAT in environment,
        unknown="an image names no model: ask for the engine or the model, too",
        pull=sum(layer.size for layer in source.files().values()),
        unpacked=source.unpacked,
    )


def _engine(source: Source, wanted: Target) -> Target:
    directory = source.path if source.kind == "directory" else None
    if directory and source.family() == "vllm" and source.read(MANIFEST_NAME) is None:
        family = VLLMFamily.open(directory)
        wanted.gpus = family.gpus or 1
        try:
            demand = family.memory()
            wanted.gpus, wanted.files = demand.gpus, demand.files
            wanted.precision = demand.precision
        except (BuildConfigInvalid, ModelUnavailable) as error:
            wanted.unknown = error.detail
        return wanted
    found = describe(source, checksums=False)
    sizes = {name: file.size for name, file in found.files.items()}
    size = max(sum(sizes.values()), source.size if isinstance(source, URL) else 0)
    manifest, elsewhere = found.manifest, 0
    wanted.unknown = f"without {MANIFEST_NAME}, what an engine needs is not recorded"
    if manifest is not None:
        if manifest.weights:  # which a start fetches
            sizes |= {name: file.size for name, file in manifest.weights.files.items()}
            elsewhere = sum(file.size for file in manifest.weights.files.values())
        wanted.cuda, wanted.gpus = manifest.versions.get("cuda"), manifest.world_size
        if manifest.engine != SEALED_ENGINE:  # which compiles for others
            wanted.sm = ",".join(map(str, manifest.sm)) or None
        try:
            wanted.files, wanted.precision = model_files.of_engine(
                source.name, source.read(CONFIG_NAME), sizes, manifest.max_seq_len
            )
        except (BuildConfigInvalid, ModelUnavailable) as error:
            wanted.unknown = error.detail
    if found.on_cpu:
        wanted.sm, wanted.files, wanted.unknown = "cpu", None, "it is for the CPU"
    wanted.pull = elsewhere + (0 if source.path else size)
    wanted.unpacked = 0 if directory else size + elsewhere
    return wanted


def fits(
    source: Source, settings: Settings, here: Sequence[int] | EngineIncompatible
) -> Iterator[Check]:
    """Driver, GPU, memory and disk against `source`, before it is fetched.

    `here` are the SMs of this machine's GPUs, or why they are not known.
    """
    try:
        wanted = target(source, settings.work_dir)
    except CogTritonError as error:
        yield unknown(source, error)
        return
    if wanted.sm != "cpu":
        yield _gpu(wanted, here)
        names = [] if isinstance(here, EngineIncompatible) else gpus.gpu_names()
        yield machine.cuda_driver(wanted.cuda, wanted.what, names, compat=wanted.compat)
    if not isinstance(here, EngineIncompatible):
        yield memory(wanted)
    yield disk(wanted)


def unknown(source: Source | None, error: CogTritonError) -> Check:
    """The check that fails as what was named is nothing, or cannot be had."""
    model = source is not None and not source.is_engine and source.kind != "image"
    advice = "name an image, an engine or a model (ORG/NAME) that can be had"
    return fail("model" if model else "engine", str(error), advice)


def _gpu(wanted: Target, here: Sequence[int] | EngineIncompatible) -> Check:
    if wanted.what != "engine" or isinstance(here, EngineIncompatible):
        return machine.gpu(wanted.sm, here)
    sms = [int(sm) for sm in wanted.sm.split(",")] if wanted.sm else []
    if problem := gpu_problem(wanted.name, sms, wanted.gpus or 1, 1, here):
        return fail("GPU", problem, "serve it on the machine that it is for")
    return machine.gpu(None, here)


def memory(wanted: Target) -> Check:
    """Weights, KV cache and activations against the GPUs' free memory; memory without GPU."""
    files = wanted.files
    if files is None:
        found, name = f"not compared: {wanted.unknown}", "memory of the GPU"
        if wanted.what == "image" or wanted.sm == "cpu":
            return ok(name, found)
        return warn(name, found, "the engine's log says what it takes, once it has loaded")
    try:
        here = gpu_table.gpu_here()
        if here is None:
            return _on_the_cpu(files)
        gpu, count = here
        gpu_table.require_supported(gpu)
        counts = [wanted.gpus] if wanted.gpus else [n for n in gpu_table.COUNTS if n <= count]
        precisions = [wanted.precision] if wanted.precision else fit.precisions_of(files, gpu)
        best = fit.choose(files, gpu, counts, precisions)
    except EngineIncompatible as error:
        return fail(wanted.what, error.detail, "another GPU, more of them, or a smaller model")
    one = best.memory
    found = (
        f"{files.name} fits {one.gpus} of {count} x {gpu.name} with {one.precision.title}:"
        f" {best.max_batch_size} sequences at once, {one.kv_tokens} tokens in the KV cache;"
        f" the largest max_model_len is {min(one.kv_tokens, files.shape.max_len)}"
    )
    if gpu.free is None:
        return ok(wanted.what, f"{found} (what is free of the GPU's memory is not known)")
    if one.usable < gpu.free:
        return ok(wanted.what, found)
    share = gpu.free * 100 // gpu.memory / 100
    taken = f"{found}; others hold {(gpu.memory - gpu.free) / GIB:.1f} GiB of the GPU"
    return warn(wanted.what, taken, f"end them, or set gpu_memory_utilization to {share}")


def _on_the_cpu(files: ModelFiles) -> Check:
    free = host_memory().free
    found = (
        f"{files.name}: {files.weight_bytes / GIB:.1f} GiB of weights, {free / GIB:.1f} GiB of"
        f" memory free, no GPU. {fit.would_do(files)}"
    )
    if files.weight_bytes > free:
        return fail("model", found, "a machine with such a GPU, or a smaller model")
    if files.weight_bytes > free // 2:
        return warn("model", found, "a smaller model, or such a GPU: other programs need memory")
    return ok("model", f"{found}; the memory here holds it, too")


def disk(wanted: Target) -> Check:
    """Check the disk for what is to be fetched, and for its unpacking."""
    place = next(path for path in (wanted.place, *wanted.place.parents) if path.exists())
    free, unpacked = shutil.disk_usage(place).free, wanted.unpacked
    needed = wanted.pull + (wanted.pull if unpacked is None else unpacked) + _SPARE
    found = f"{free / _GB:.1f} GB free at {place}; {wanted.pull / _GB:.1f} GB to fetch, " + (
        "unpacked at least as much: compressed layers do not tell"
        if unpacked is None
        else f"{unpacked / _GB:.1f} GB unpacked"
    )
    if free >= needed:
        return ok("disk for it", found)
    setting = "COG_TRITON_WORK_DIR, or HF_HOME for a model,"
    if wanted.what == "image":
        setting = "the data root of the container engine"
    advice = f"free {(needed - free) / _GB:.1f} GB, or set {setting} to a larger disk"
    return fail("disk for it", found, advice)


def engine(source: Source, here: Machine | None) -> tuple[Needs | None, Check]:
    """The engine's requirements (None if it is none), and whether `here` meets them.

    `here` is None without Triton: then nothing is compared.
    """
    try:
        needs = _needs(source)
    except CogTritonError as error:
        return None, fail("engine", str(error), "name an engine that is whole: build or fetch it")
    ranks = f", {needs.world_size} ranks" if needs.world_size > 1 else ""
    found = f"{source.name}: {needs.backend} backend{ranks}"
    if here is None:
        return needs, warn("engine", f"{found}; not compared", "get a tritonserver first")
    try:
        remarks = compatibility.require_engine(needs, here)
    except EngineIncompatible as error:
        return needs, fail("engine", error.detail, "serve it on the machine that it is for")
    if remarks:
        return needs, warn("engine", f"{found}; {'; '.join(remarks)}", "build it with cog-triton")
    return needs, ok("engine", f"{found}; it fits, and its files' sizes are right")


def _needs(source: Source) -> Needs:
    if source.kind == "directory" and source.path is not None:
        family = open_engine(source.path)
        given = (family.backend, family.world_size, family.versions)
        return compatibility.needs_of(source.path, *given)
    found = describe(source, checksums=False)
    backends = {family.name: family.backend for family in FAMILIES}
    if found.engine not in backends:
        rule = f"must be one of {', '.join(backends)}"
        raise EngineCorrupt(f"{source.name}: engine: {found.engine!r}: {rule}")
    no_gpu = found.on_cpu or found.engine == SEALED_ENGINE
    return Needs(
        engine=source.name,
        backend=backends[found.engine],
        world_size=0 if no_gpu else found.limits["world_size"] or 1,
        sm=found.sm,
        versions=found.versions,
    )


def seals(source: Source, settings: Settings) -> Check | None:
    """Whether compiled code of the engine is used; None if it has none, or is none."""
    try:
        text = source.read(MANIFEST_NAME)
        found = None if text is None else SealedManifest.parse(text, Path(source.name))
        if found is None or not found.manifest.seals:
            return None
        pins = checked_pins(settings.seal_sha256)
        why = found.distrust(settings.work_dir, pins, source.digest)
    except CogTritonError as error:
        return fail("seal", error.detail, "name an engine that is whole")
    sealed = f"for {', '.join(found.manifest.seals)}"
    if why is not None and settings.seal_signer is not None:
        why = f"{why}; {unsigned(settings, settings.seal_signer, None)}"
    if why is not None:
        return warn("seal", f"{sealed}: left unread: {why}", "pin it, if you trust its maker")
    return ok("seal", f"{sealed}: trusted; the start says whether it fits")
