"""Sealed caches: a seal of the engine, put where this start's compilers look for what they made.

Nothing is opened here but the manifest, and it only if whoever started the server trusts it by its
digest. Each file is compared with the manifest as it is copied, so that vLLM, which unpickles what
its own hash names, finds the bytes that were trusted, in a directory that this user alone writes.

What vLLM compiled is a pickle, and what Triton compiled is loaded into the process: both are code
of whoever made the tar. They are used if this user built the engine on this host, which the build
records, or if whoever starts the server pins the digest, or a key that signed the engine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cog_triton.artifact import engine_manifest, seal
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, Manifest
from cog_triton.artifact.seal import Environment
from cog_triton.engines.vllm import request_import
from cog_triton.engines.vllm.compiler_caches import REQUIRED, ROOT, TRUSTED, require_own
from cog_triton.errors import EngineCorrupt, EngineIncompatible, InvalidArgument
from cog_triton.system.gpus import NVIDIADriver

FOLDER = "trusted-seals"
"""Its name in the work directory: an empty file for each manifest that was built here."""
_PREFIX = "sha256:"


def remember(work_dir: Path, digest: str) -> None:
    """Record that this user built the engine whose manifest has this digest, in hexadecimal.

    Raises:
        EngineIncompatible: others may write to the records.
    """
    base = work_dir / FOLDER
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(base)
    (base / digest).touch(mode=0o600)


def built_here(work_dir: Path) -> set[str]:
    """Digests of the manifests whose engines this user built on this host."""
    base = work_dir / FOLDER
    try:
        require_own(base)
        return {path.name for path in base.iterdir()}
    except (OSError, EngineIncompatible):
        return set()


@dataclass(frozen=True)
class SealedManifest:
    """Manifest of an engine directory with something that schema 3 has, and its digest."""

    directory: Path
    manifest: Manifest
    digest: str

    @classmethod
    def of(cls, directory: Path) -> SealedManifest | None:
        """That of `directory`; None if it has none, or one of another schema. Raises E1306."""
        path = directory / MANIFEST_NAME
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file:
                text = file.read(engine_manifest.MAX_TEXT + 1)
        except OSError as error:
            raise EngineCorrupt(f"{path}: cannot be read: {error.strerror}") from error
        return cls.parse(text, directory)

    @classmethod
    def parse(cls, text: bytes, engine: Path) -> SealedManifest | None:
        """That of `text`, the manifest of `engine`; as `of`."""
        manifest = engine_manifest.parse(text, f"{engine}: {MANIFEST_NAME}")
        if manifest.schema_ < 3:
            return None
        return cls(engine, manifest, hashlib.sha256(text).hexdigest())

    def distrust(
        self, work_dir: Path, pins: Collection[str], registry_digest: str | None
    ) -> str | None:
        """Why its seals are not to be opened; None if they are trusted.

        Args:
            pins: `checked_pins`, each the digest of a manifest or of an engine in its registry.
            registry_digest: what the engine was pulled by, ``sha256:...``.
        """
        known = {self.digest, (registry_digest or "").removeprefix(_PREFIX)}
        if known & {*(pins or built_here(work_dir))}:
            return None
        if pins:
            return f"SEAL_SHA256 is {', '.join(pins)}, and its manifest has sha256 {self.digest}"
        return (
            "compiled code runs as this user, and this engine was not built by this user on this"
            f" host: if you trust who made it, set SEAL_SHA256={self.digest}"
        )


def checked_pins(setting: str | None) -> list[str]:
    """The digests of SEAL_SHA256, in hexadecimal; raises E1005 for what is none."""
    pins = [pin.strip().removeprefix(_PREFIX) for pin in (setting or "").split(",")]
    for pin in filter(None, pins):
        if not re.fullmatch("[0-9a-f]{64}", pin):
            raise InvalidArgument(
                f"SEAL_SHA256={pin[:80]!r}: must be 64 hexadecimal digits, with or without sha256:"
                " before, or several of them with commas between"
            )
    return [pin for pin in pins if pin]


_log = logging.getLogger(__name__)
AOT = "vllm/torch_compile_cache/torch_aot_compile"
"""Where vLLM keeps compiled models, each by its hash, below the directory of all caches."""
GROUP = "__grp__"
"""Begin of the names of Triton's files that name the files of a kernel."""
_KERNELS = "triton"
# What vLLM writes anew where it does not fit this machine, and is no code.
_MAY_DIFFER = ("vllm/startup_plan/", "vllm/modelinfos/")
_OWN = ("cog-triton", "cog-triton-import", "pip", "uv")
_CUDA = re.compile(r"^cuda\b[^=\n]*= ['\"]([\d.]+)['\"]", re.MULTILINE)
_ASK = """
import json
from cog_triton.engines.vllm.sealed_caches import installed
from cog_triton.system import gpus
driver, (versions, packages) = gpus.installed_driver(), installed()
names, sms = gpus.gpu_names(), gpus.visible_gpus()
print(json.dumps([names, sms, driver.version, driver.cuda, versions, packages]))
"""
_ASK_S = 60.0


def environment_here(ranks: int) -> tuple[Environment, NVIDIADriver]:
    """The environment of this Python on this machine, and NVIDIA's driver; imports neither.

    A process of its own asks the driver, which would know this one from then on, and looks for
    packages: setuptools, once it is imported, adds a path with others to this one's.

    Raises:
        EngineIncompatible: the driver does not answer.
    """
    asked = subprocess.run(
        [sys.executable, "-c", _ASK],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_ASK_S,
    )
    if asked.returncode:
        raise EngineIncompatible(f"the GPU is not known: {asked.stderr.strip()[-400:]}")
    names, sms, driver, cuda, found, packages = json.loads(asked.stdout.splitlines()[-1])
    environment = Environment(
        vllm=found.get("vllm", ""),
        torch=found.get("torch", ""),
        triton=found.get("triton", ""),
        cuda=_cuda_of_torch(),
        python=platform.python_version(),
        packages=packages,
        gpu_name=", ".join(sorted(set(names[:ranks]))),
        sm=min(sms[:ranks], default=0),
        ranks=ranks,
    )
    return environment, NVIDIADriver(driver, tuple(cuda) if cuda else None)


def installed() -> tuple[dict[str, str], str]:
    """Versions of the packages that this Python finds, and the digest of all but our own."""
    found, packages = {}, []
    for package in importlib.metadata.distributions():
        name = (package.metadata["Name"] or "").lower()
        found[name] = package.version
        if name not in _OWN:
            packages.append(f"{name}=={package.version} {_files_of(package)}")
    return found, hashlib.sha256("\n".join(sorted(packages)).encode()).hexdigest()


def _files_of(package: importlib.metadata.Distribution) -> str:
    """Digest of the sums that a package's wheel has of its files; who installed it adds none."""
    lines = (package.read_text("RECORD") or "").splitlines()
    own = [line for line in lines if ",sha256=" in line and ".dist-info/" not in line]
    kept = sorted(line for line in own if not line.startswith((".", "/", '"')))  # no scripts
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def _cuda_of_torch() -> str:
    """CUDA's version that torch was built with, from its own file, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        match = _CUDA.search(Path(spec.origin).with_name("version.py").read_text("utf-8"))
    except OSError:
        return ""
    return match[1] if match else ""


@dataclass(frozen=True)
class Trusted:
    """The manifest of an engine directory, whose digest is the one that is trusted."""

    directory: Path
    manifest: Manifest
    required: bool

    @classmethod
    def of(cls, directory: Path, options: Mapping[str, str]) -> Trusted:
        """The manifest that `options`, the engine's parameters, trust.

        Raises:
            EngineCorrupt: it is no longer what is trusted.
        """
        wanted = options[TRUSTED]
        found = SealedManifest.of(directory)
        if found is None or found.digest != wanted:
            told = found.digest if found else "none of a sealed engine"
            raise EngineCorrupt(f"{directory}: its manifest is {told}, and {wanted} is trusted")
        required = found.manifest.seal_required or options.get(REQUIRED) == "true"
        return cls(directory, found.manifest, required)

    def set_variables(self) -> None:
        """Set the variables that the engine was sealed with, where the user has set none."""
        for name, value in self.manifest.variables.items():
            os.environ.setdefault(name, value)

    def seed(self, root: Path | None, ranks: int) -> Seeded | None:
        """Copy the seal that fits below `root`, the directory of all caches; None if none is used.

        Raises:
            EngineCorrupt: a file is not what the manifest says.
            EngineIncompatible: a seal is required and none fits; says what differs.
        """
        here, driver = environment_here(ranks)
        reasons = []
        for name, one in sorted(self.manifest.seals.items()):
            found = one.misfits(here, driver.version) or list(_elsewhere(root))
            if not found and root is not None:
                self._copy(name, root)
                os.environ[request_import.MOVED] = name
                _log.info("compiled code is the engine's own, sealed for %s", name)
                return Seeded(root, name, frozenset(one.aot), compiled(root), self.required)
            reasons.append(f"{name}: {', '.join(found)}")
        self._unused("; ".join(reasons) or "it has none")
        return None

    def _unused(self, reason: str) -> None:
        text = f"{self.directory}: no seal of the engine is used: {reason}"
        if self.required:
            raise EngineIncompatible(f"{text}, and a seal is required")
        _log.warning("%s; vLLM compiles it here", text)

    def _copy(self, name: str, root: Path) -> None:
        check_seal(self.directory, self.manifest, name)
        begin = f"{seal.DIRECTORY}/{name}/"
        for file in seal.files_of(name, self.manifest.files):
            place = file.removeprefix(begin)
            data = _verified(self.directory, self.manifest, file)
            if _is_group(file):
                data = _group(file, data, root / PurePosixPath(place).parent, self.manifest.files)
            target = root / place
            if target.is_file() and (place.startswith(_MAY_DIFFER) or target.read_bytes() == data):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
            fresh.write_bytes(data)
            fresh.replace(target)


def check_seal(directory: Path, manifest: Manifest, name: str) -> None:
    """Check what a manifest says of a seal, and where Triton's files say that kernels are.

    Nothing is opened but these, which are JSON.

    Raises:
        EngineCorrupt: vLLM's hashes are others than those of the files, or a kernel is elsewhere.
    """
    held = seal.files_of(name, manifest.files)
    models = f"{seal.DIRECTORY}/{name}/{AOT}/"
    hashes = {file.removeprefix(models).split("/")[0] for file in held if file.startswith(models)}
    if hashes != set(manifest.seals[name].aot):
        raise EngineCorrupt(
            f"{directory}: seal {name} has compiled models {sorted(hashes)}, its manifest"
            f" names {sorted(manifest.seals[name].aot)}"
        )
    for file in filter(_is_group, held):
        _group(file, _verified(directory, manifest, file), Path(), manifest.files)


def _is_group(file: str) -> bool:
    return PurePosixPath(file).name.startswith(GROUP)


def _verified(directory: Path, manifest: Manifest, name: str) -> bytes:
    path, entry = directory / name, manifest.files[name]
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            size = os.fstat(file.fileno()).st_size  # 0 of a pipe, which has no end
            engine_manifest.check_entry(name, entry, size, None)
            data = file.read(entry.size + 1)
    except OSError as error:
        raise EngineCorrupt(f"{path}: {error.strerror}") from error
    engine_manifest.check_entry(name, entry, len(data), hashlib.sha256(data).hexdigest())
    return data


def _elsewhere(root: Path | None) -> Iterator[str]:
    """Why this start's compilers do not look below `root`."""
    if root is None:
        yield f"{ROOT} set by the user" if ROOT in os.environ else "no directory for caches"
    if request_import.unlisted():
        yield f"VLLM_PLUGINS without {request_import.PLUGIN} set by the user"


def _group(name: str, data: bytes, place: Path, files: Mapping[str, object]) -> bytes:
    """Triton's group file `data` for a kernel in `place`; raises E1306 for a path out of it."""
    try:
        children = json.loads(data)["child_paths"]
        beside = PurePosixPath(name).parent
        for child, path in children.items():
            if path != child or "/" in child or f"{beside}/{child}" not in files:
                raise EngineCorrupt(f"{name}: names {path!r:.200}, which is no file beside it")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineCorrupt(f"{name}: is no group of Triton's: {error}") from error
    return json.dumps({"child_paths": {child: str(place / child) for child in children}}).encode()


Compiled = tuple[dict[str, tuple[int, int]], frozenset[str]]


def compiled(root: Path) -> Compiled:
    """What there is below `root`: compiled models by hash and rank, and Triton's kernels."""
    models = {
        path.relative_to(root / AOT).as_posix(): ((told := path.stat()).st_ino, told.st_mtime_ns)
        for path in (root / AOT).glob("*/rank_*/model")
    }
    return models, frozenset(path.parent.name for path in (root / _KERNELS).rglob(f"{GROUP}*.json"))


@dataclass(frozen=True)
class Seeded:
    """A start whose caches hold a seal: what was there `before`, to compare once it has loaded."""

    root: Path
    name: str
    sealed: frozenset[str]
    before: Compiled
    required: bool

    def check(self) -> None:
        """Tell what was compiled all the same; raises E1305 where a seal is required."""
        (models, kernels), (had, held) = compiled(self.root), self.before
        anew = sorted(place for place, told in models.items() if had.get(place) != told)
        if not anew:
            _log.info("nothing was compiled, but for %d kernels", len(kernels - held))
            return
        hashes = {place.split("/")[0] for place in anew}
        if unknown := hashes - self.sealed:
            why = f"vLLM's hash of it is {', '.join(sorted(unknown))}, which was not sealed"
        else:
            why = "vLLM did not take what was sealed under its hash; its log says why"
        given = sorted(name for name in os.environ if name.startswith(("VLLM_", "TORCHINDUCTOR_")))
        text = (
            f"the model was compiled anew ({', '.join(anew)}): {why}. Its hash has vLLM's arguments"
            f" and variables in it; set are {', '.join(given)}"
        )
        if self.required:
            raise EngineIncompatible(f"{text}; a seal is required")
        _log.warning("%s", text)


# What compilers leave behind beside what they made; the last three tell of this machine.
_LEFT = re.compile(
    r"(^|/)(lock|[^/]*\.(lock|tmp|new)|tmp\.pid_[^/]*/.*"
    r"|cache_key_factors\.json|computation_graph\.py|transformed_code\.py)$"
)


def collect(root: Path, target: Path) -> None:
    """Copy what compilers made below `root` to `target`, as a seal has it: without its path.

    What is there already, of another start of the same engine, stays.
    """
    for name, path in engine_manifest.files_of(root).items():
        copy = target / name
        if _LEFT.search(name) or path.is_symlink() or copy.exists():
            continue
        data = path.read_bytes()
        if path.name.startswith(GROUP):
            try:
                children = json.loads(data)["child_paths"].items()
            except (ValueError, KeyError, AttributeError):
                continue  # which Triton does not read either
            if any(Path(child) != path.parent / file for file, child in children):
                continue
            data = json.dumps({"child_paths": {file: file for file, _ in children}}).encode()
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)


def hashes_of(root: Path) -> list[str]:
    """vLLM's hashes of the models that were compiled below `root`, sorted."""
    return sorted(path.name for path in (root / AOT).glob("*") if any(path.glob("rank_*/model")))
