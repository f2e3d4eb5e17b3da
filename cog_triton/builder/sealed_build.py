"""Build of a sealed vLLM engine: its model, what it compiles on this GPU, the proof, the tar."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cog_triton import __version__
from cog_triton.artifact import engine_manifest, engine_tar, lora_adapter, seal
from cog_triton.artifact.canary import CANARY_NAME, Canary
from cog_triton.artifact.engine_manifest import (
    BUILD_CONFIG,
    MANIFEST_NAME,
    AdapterEntry,
    FileEntry,
    Manifest,
    WeightsReference,
    adapter_directory,
)
from cog_triton.artifact.seal import Seal, seal_name
from cog_triton.builder import other_user, package, sealed_package, step_cache
from cog_triton.builder.packed_adapters import naming
from cog_triton.builder.plan import Script, Step
from cog_triton.builder.sealed_config import SealedConfig
from cog_triton.builder.sealed_package import OtherSeal, as_json, link
from cog_triton.builder.step import run_process
from cog_triton.builder.workspace import Echo, Workspace
from cog_triton.download import model_source
from cog_triton.download.adapter_source import fetch_adapter
from cog_triton.download.model_request import FetchedModel
from cog_triton.engines.base import EngineLimits
from cog_triton.engines.engine_spec import PARKABLE
from cog_triton.engines.vllm import compiler_caches, engine_sleep, sealed_caches
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.engines.vllm.model_directory import LORA_FILE, MODEL_FILE
from cog_triton.engines.vllm.seal_start import Started
from cog_triton.errors import (
    BuildConfigInvalid,
    BuildStepFailed,
    EngineIncompatible,
    ModelUnavailable,
)
from cog_triton.packages.vllm_environment import find_vllm
from cog_triton.settings import load_group
from cog_triton.settings.engine import EngineSettings
from cog_triton.settings.programs import FileSettings
from cog_triton.system import isolated_python
from cog_triton.system.atomic_write import write_json
from cog_triton.system.gpus import gpu_names, installed_driver, visible_gpus
from cog_triton.system.redaction import redact_address
from cog_triton.text.tokenizer import EngineTokenizer

_MOST_STARTS = 3
_ROOM = str(1 << 40)
# What the build writes into an engine, whatever the model has of these names.
_OURS = (MANIFEST_NAME, MODEL_FILE, LORA_FILE, CANARY_NAME, BUILD_CONFIG)
_OUR_FOLDERS = (f"{seal.DIRECTORY}/", "lora/")


@dataclass(frozen=True)
class SealedPlan:
    """A sealed engine to build in `work_dir`, by the vLLM of `python`.

    `added` are engine.tars of the same config, whose seals for other GPUs are packed, too.
    """

    config: SealedConfig
    work_dir: Path
    python: str
    added: Sequence[Path] = ()

    @classmethod
    def of(cls, config: SealedConfig, work_dir: Path, added: Sequence[Path] = ()) -> SealedPlan:
        """The plan of `config`, with the Python that a server would run vLLM in."""
        python = load_group(EngineSettings).cog_triton_vllm_python
        if python is None and (found := find_vllm(load_group(FileSettings).work_dir)):
            python = found.python
        return cls(config, Path(os.path.realpath(work_dir)), str(python or sys.executable), added)


@dataclass
class SealedBuild:
    """A build of a sealed engine as far as it has come, as `cog_triton.builder.run.Build` is."""

    plan: SealedPlan
    workspace: Workspace
    output: Path
    echo: Echo
    cache: bool
    alone: bool
    held: contextlib.ExitStack
    adapters: dict[str, AdapterEntry] = field(default_factory=dict)
    _others: dict[str, OtherSeal] = field(default_factory=dict)
    _model: FetchedModel = field(init=False)
    _limits: EngineLimits = field(init=False)
    _input_ids: list[int] = field(init=False)
    _state: str = field(init=False)
    _proof: str = field(init=False)
    _told: Started = field(init=False)
    _seal: Seal = field(init=False)

    @property
    def config(self) -> SealedConfig:
        """The config, as it is run."""
        return self.plan.config

    def check(self) -> None:
        """Check that there is a GPU to compile for, and enough of them.

        Raises:
            EngineIncompatible: there is none, or fewer than ranks.
        """
        ranks, here = engine_sleep.ranks(self.config.args), len(visible_gpus())
        if here < ranks:
            raise EngineIncompatible(
                f"engine: vllm is compiled on the GPUs that it is for: it has {ranks} ranks, and"
                f" {here or 'none'} of them {'are' if here else 'is'} here"
            )
        if absent := next((tar for tar in self.plan.added if not tar.is_file()), None):
            raise ModelUnavailable(f"--add-seal {absent}: no such file")

    def fetch(self) -> None:
        """Wait for the work directory, fetch model and adapters, and lay the engine out there."""
        work_dir = self.plan.work_dir
        work_dir.mkdir(parents=True, exist_ok=True)
        self.held.enter_context(self.workspace.turn(work_dir, self.echo))
        if self.alone:
            self.workspace.remove_others(work_dir)
        self._model = model_source.fetch_model(
            self.config.request, self.workspace.models, self.echo
        )
        path = self._model.path
        self.echo(f"[model] {self.config.model_id}: {path}")
        if not (path / "config.json").is_file():
            raise ModelUnavailable(
                f"model_id {redact_address(self.config.model_id)!r}: {path} has no config.json:"
                " vLLM takes a directory as the hub has it"
            )
        for number, tar in enumerate(self.plan.added):
            place = work_dir / "added" / str(number)
            shutil.rmtree(place, ignore_errors=True)
            self._others |= sealed_package.seals_of(tar, self.config, self._model, place)
        self._stage(path)
        family = VLLMFamily.open(self._engine)
        if family.model.embeds:
            raise BuildConfigInvalid("args.runner: an engine that makes no text has no canary")
        self._limits = family.limits
        prompt = self.config.canary.prompt
        self._input_ids = EngineTokenizer.load(family.tokenizer_dir).encode(prompt)
        self._state = step_cache.digest(
            [
                self.config.fingerprint,
                step_cache.listing(path),
                [entry.model_dump() for entry in self.adapters.values()],
                step_cache.python_of(self.plan.python),
                gpu_names(),
                installed_driver().version,
                __version__,
            ]
        )

    @property
    def _engine(self) -> Path:
        """The engine as it is packed, but for what is compiled: links to the model's files."""
        return self.plan.work_dir / "engine"

    def _stage(self, model: Path) -> None:
        shutil.rmtree(self._engine, ignore_errors=True)
        self._engine.mkdir()
        for name, file in engine_manifest.files_of(model).items():
            hidden = any(part.startswith(".") for part in name.split("/"))
            if not (hidden or name in _OURS or name.startswith(_OUR_FOLDERS)):
                link(file, self._engine / name)
        arguments: dict[str, Any] = dict(self.config.args)
        if self.config.lora_adapters:
            arguments["enable_lora"] = True
            self._fetch_adapters()
            places = {name: adapter_directory(name) for name in sorted(self.adapters)}
            (self._engine / LORA_FILE).write_text(as_json(places), "utf-8")
        (self._engine / MODEL_FILE).write_text(as_json(arguments), "utf-8")

    def _fetch_adapters(self) -> None:
        most = load_group(EngineSettings).max_lora_bytes
        for name, wanted in self.config.lora_adapters.items():
            with naming(name):
                fetched = fetch_adapter(
                    wanted.source,
                    Path(),
                    self.workspace.models,
                    most,
                    self.echo,
                    token=self.config.request.token,
                    revision=wanted.revision,
                    sha256=wanted.sha256,
                )
                adapter = lora_adapter.read_adapter(fetched.path)
            for file in lora_adapter.FILES:
                link(fetched.path / file, self._engine / adapter_directory(name) / file)
            self.adapters[name] = AdapterEntry(
                source=redact_address(wanted.source),
                revision=fetched.revision,
                rank=adapter.rank,
                base_model=adapter.base_model,
            )

    def compile(self) -> None:
        """Start the engine until a start compiles nothing, and keep what the compilers left."""
        known = self._record("compile", self._state, self._sealed)
        if known is not None:
            self.echo("[compile] already done")
            self._told = Started.model_validate(known)
            return
        caches = self.plan.work_dir / "compiled"
        for place in (caches, self._sealed):
            shutil.rmtree(place, ignore_errors=True)
        first: Started | None = None
        for parameters in self._variants():
            held = -1
            for _ in range(_MOST_STARTS):
                told = self._start("compile", self._engine, caches, parameters)
                first = first or told
                if told.held == held:
                    break
                held = told.held
        assert first is not None
        self._told = first
        for root in sorted(caches.iterdir()):
            sealed_caches.collect(root, self._sealed / seal_name(first.environment))
        self._remember("compile", self._state, self._sealed, first.model_dump())

    def _variants(self) -> Sequence[dict[str, str]]:
        return ({}, {PARKABLE: "true"}) if self.config.spare else ({},)

    @property
    def _sealed(self) -> Path:
        """The directory of seals of this build."""
        return self.plan.work_dir / seal.DIRECTORY

    def prove(self) -> None:
        """Start the engine from its seal in another place, where nothing may be compiled.

        Raises:
            BuildStepFailed: something was, or the answer is another one.
        """
        name = seal_name(self._told.environment)
        self._proof = step_cache.digest([self._state, step_cache.listing(self._sealed)])
        made = Seal(
            environment=self._told.environment,
            driver=sealed_package.oldest_driver(self._told),
            aot=sealed_caches.hashes_of(self._sealed / name),
            compile_seconds=self._told.seconds,
            seconds=0.0,
            apart=False,
        )
        known = self._record("prove", self._proof, self._sealed)
        if known is not None:
            self.echo("[prove] already done")
            self._seal = Seal.model_validate(known)
            return
        if not made.aot:
            self.echo("[prove] warning: vLLM compiled no model: the seal has kernels alone")
        proof = self.plan.work_dir / "proof"
        shutil.rmtree(proof, ignore_errors=True)
        engine = proof / "engine"
        digest = self._lay_out(engine, name, made)
        caches = proof / "caches"
        held = [path.resolve() for path in engine_manifest.files_of(engine).values()]
        ours = isolated_python.environment_of(self.plan.python, self.plan.work_dir)
        other = other_user.command(self.plan.python, ours, held, caches)
        made = made.model_copy(update={"apart": bool(other)})
        self.echo(f"[prove] by {'another' if other else 'the same'} user, at another path")
        parameters = {compiler_caches.TRUSTED: digest, compiler_caches.REQUIRED: "true"}
        expected = sum(map(len, sealed_caches.compiled(self._sealed / name)))
        seconds: list[float] = []
        for variant in self._variants():
            more = {"VLLM_FORCE_AOT_LOAD": "1"} if made.aot else {}
            if other:
                more["HOME"] = str(caches)
            told = self._start("prove", engine, caches, {**parameters, **variant}, more, other)
            seconds.append(told.seconds)
            if told.output_ids != self._told.output_ids:
                raise BuildStepFailed(
                    f"prove: the canary was answered with {told.output_ids}, and with"
                    f" {self._told.output_ids} while it was compiled: the engine cannot be proven"
                )
            if told.held != expected:
                raise BuildStepFailed(
                    f"prove: {told.held - expected} kernels were compiled, for which {expected}"
                    " were sealed: a start from the seal would compile them, too"
                )
        shutil.rmtree(proof)
        self._seal = made.model_copy(update={"seconds": seconds[0]})
        self.echo(
            f"[prove] started in {seconds[0]:g} s, where compiling took {self._told.seconds:g} s"
        )
        self._remember("prove", self._proof, self._sealed, self._seal.model_dump())

    def _lay_out(self, engine: Path, name: str, made: Seal) -> str:
        """An engine to prove the seal with, at another path; returns its manifest's digest."""
        for file, path in engine_manifest.files_of(self._engine).items():
            link(path.resolve(), engine / file)
        files = {}
        for file, path in engine_manifest.files_of(self._sealed).items():
            copy = engine / seal.DIRECTORY / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            files[f"{seal.DIRECTORY}/{file}"] = sealed_package.entry_of(copy)
        manifest = self._manifest({name: made}, files, None)
        (engine / MANIFEST_NAME).write_text(manifest.to_json(), "utf-8")
        return hashlib.sha256(manifest.to_json().encode()).hexdigest()

    def pack(self) -> None:
        """Pack the engine, unless the output is what the last build packed; it is trusted then."""
        name = seal_name(self._told.environment)
        members: dict[str, Path | bytes] = {**engine_manifest.files_of(self._engine)}
        weights = (
            sealed_package.take_weights(members, self.config, self._model)
            if self.config.weights == "reference"
            else None
        )
        seals = {name: self._seal}
        files = engine_manifest.files_of(self._sealed)
        members |= {f"{seal.DIRECTORY}/{file}": path for file, path in files.items()}
        for other, one in self._others.items():
            if other not in seals:
                seals[other] = one.seal
                members |= one.files
        canary = Canary(input_ids=self._input_ids, output_ids=self._told.output_ids)
        members[CANARY_NAME] = canary.to_json().encode()
        members[BUILD_CONFIG] = self.config.to_yaml().encode()
        state = step_cache.digest(
            [self._proof, {key: one.model_dump() for key, one in seals.items()}]
        )
        if self.cache and self._is_packed(state):
            self.echo(f"[package] {self.output} is already written")
            return
        self.echo(f"[package] {self.output}")
        made: list[Manifest] = []

        def describe(entries: dict[str, FileEntry]) -> Manifest:
            made.append(self._manifest(dict(sorted(seals.items())), entries, weights))
            return made[-1]

        total = sum(map(engine_tar.size_of, members.values()))
        engine_tar.pack(members, self.output, describe, package.TarProgress(total, self.echo))
        digest = hashlib.sha256(made[-1].to_json().encode()).hexdigest()
        sealed_caches.remember(load_group(FileSettings).work_dir, digest)
        self.echo(f"[package] sealed for {', '.join(sorted(seals))}; elsewhere than on this host:")
        self.echo(f"[package] SEAL_SHA256={digest}")
        write_json(self._path("package"), self._packed(state))

    def _manifest(
        self,
        seals: dict[str, Seal],
        files: dict[str, FileEntry],
        weights: WeightsReference | None,
    ) -> Manifest:
        return sealed_package.manifest_of(
            self.config, self._model, self._limits, self.adapters, seals, files, weights
        )

    def _start(
        self,
        name: str,
        engine: Path,
        caches: Path,
        parameters: dict[str, str],
        environment: dict[str, str] | None = None,
        begin: Sequence[str] = (),
    ) -> Started:
        """Start the engine in `engine` as a server does, with its caches below `caches`."""
        given = {
            "engine_dir": str(engine),
            compiler_caches.DIRECTORY: str(caches),
            compiler_caches.MOST_BYTES: _ROOM,
            **parameters,
        }
        python, tokens = self.plan.python, self.config.canary.tokens
        words = [json.dumps(given), json.dumps(self._input_ids), str(tokens)]
        script = Script(
            name="seal_start",
            argv=(*begin, python, "-m", "cog_triton.engines.vllm.seal_start", *words),
            path=Path(python),
            python=python,
        )
        step = Step(
            name=name,
            script=script,
            args={},
            cwd=self.plan.work_dir,
            input=engine,
            output_dir=caches,
            env={**self.config.variables, **(environment or {})},
            timeout=self.config.timeout,
        )
        token = self.config.request.token or os.environ.get("HF_TOKEN", "").strip()
        secrets = {"HF_TOKEN": token} if token else {}
        stream = run_process(step, self.plan.work_dir / "logs", self.echo, secrets)
        for line in reversed(stream.last):
            if line.startswith('{"output_ids"'):
                return Started.model_validate_json(line)
        raise BuildStepFailed(f"{name}: the engine ended without an answer (log: {stream.log})")

    def _path(self, name: str) -> Path:
        return step_cache.record_path(self.plan.work_dir, name)

    def _record(self, name: str, state: str, output: Path) -> dict[str, Any] | None:
        """What the stage told, if it was done in this state and its output is untouched."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self._path(name).read_text("utf-8"))
            same = found["state"] == state and found["output"] == step_cache.listing(output)
            if self.cache and same:
                return dict(found["told"])
        self._path(name).unlink(missing_ok=True)
        return None

    def _remember(self, name: str, state: str, output: Path, told: dict[str, Any]) -> None:
        record = {"state": state, "output": step_cache.listing(output), "told": told}
        write_json(self._path(name), record)

    def _is_packed(self, state: str) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(json.loads(self._path("package").read_text("utf-8")) == self._packed(state))
        return False

    def _packed(self, state: str) -> dict[str, Any]:
        told = self.output.stat()
        identity = [str(self.output.resolve()), told.st_size, told.st_mtime_ns, told.st_ino]
        return {"state": state, "output": identity}


STAGES: Sequence[tuple[str, Callable[[SealedBuild], None]]] = (
    ("check", SealedBuild.check),
    ("model", SealedBuild.fetch),
    ("compile", SealedBuild.compile),
    ("prove", SealedBuild.prove),
    ("package", SealedBuild.pack),
)
"""What a build of a sealed engine does one after another."""
