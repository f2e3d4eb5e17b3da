"""Build of a sealed vLLM engine: its model, what it compiles on this GPU, the proof, the engine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cog_triton import __version__
from cog_triton.artifact import lora_adapter, seal
from cog_triton.artifact.canary import CANARY_NAME, Canary
from cog_triton.artifact.engine_manifest import (
    BUILD_CONFIG,
    MANIFEST_NAME,
    AdapterEntry,
    adapter_directory,
    files_of,
    sha256_of,
)
from cog_triton.artifact.seal import Seal, seal_name, seal_of
from cog_triton.builder import other_user, package, sealed_package
from cog_triton.builder.config import SealedConfig
from cog_triton.builder.packed_adapters import entry_of, fetch_source, naming
from cog_triton.builder.plan import Script, Step
from cog_triton.builder.script_build import python_of
from cog_triton.builder.sealed_package import as_json, link
from cog_triton.builder.step import run_step
from cog_triton.builder.workspace import Echo, Stage, Workspace, link_or_copy, listing
from cog_triton.download import model_source
from cog_triton.download.model_request import FetchedModel
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
from cog_triton.system.gpus import gpu_names, installed_driver, visible_gpus
from cog_triton.system.redaction import redact_address
from cog_triton.text.tokenizer import EngineTokenizer

_MOST_STARTS = 3
_ROOM = str(1 << 40)
# What the build writes into an engine, whatever the model has of these names.
_OURS = (MANIFEST_NAME, MODEL_FILE, LORA_FILE, CANARY_NAME, BUILD_CONFIG)
_OUR_FOLDERS = (f"{seal.DIRECTORY}/", "lora/")
_COMPILED, _PROVEN = "compiled.json", "seal.json"
Adapters = Mapping[str, tuple[Path, AdapterEntry]]
"""Adapters by name: their directories, and what the manifest says of them."""


class _Compiled(BaseModel):
    """What the first start of an engine reported, and the canary's prompt in tokens."""

    started: Started
    prompt: list[int]

    @property
    def name(self) -> str:
        return seal_name(self.started.environment)


class SealedBuild:
    """A build of a sealed vLLM engine: compiled on this machine's GPUs, and proven.

    Attributes:
        python: the Python that a server would run vLLM in.
    """

    def __init__(
        self, config: SealedConfig, workspace: Workspace, echo: Echo, added: Sequence[Path] = ()
    ) -> None:
        """`added` are engine.tars of the same config, whose seals are packed, too."""
        self.config = config
        self.workspace, self.echo, self._added = workspace, echo, added
        python = load_group(EngineSettings).cog_triton_vllm_python
        if python is None and (found := find_vllm(load_group(FileSettings).work_dir)):
            python = found.python
        self.python = str(python or sys.executable)

    @property
    def names(self) -> list[str]:
        """Names of the stages that `fetch` will return."""
        return [*("seals" for _ in self._added), "compile", "prove", package.ENGINE]

    def check(self) -> None:
        """Check that there is a GPU to compile for, and enough of them.

        Raises:
            EngineIncompatible: there is none, or fewer than ranks.
            ModelUnavailable: a tar with another seal is not there.
        """
        ranks, here = engine_sleep.ranks(self.config.args), len(visible_gpus())
        if here < ranks:
            raise EngineIncompatible(
                f"engine: vllm is compiled on the GPUs that it is for: it has {ranks} ranks, and"
                f" {here or 'none'} of them {'are' if here else 'is'} here"
            )
        if absent := next((tar for tar in self._added if not tar.is_file()), None):
            raise ModelUnavailable(f"--add-seal {absent}: no such file")

    def fetch(self) -> list[Stage]:
        """Fetch model and adapters; returns the stages."""
        models = self.workspace.models
        model = model_source.fetch_model(self.config.request, models, self.echo)
        self.echo(f"[model] {self.config.model_id}: {model.path}")
        if not (model.path / "config.json").is_file():
            raise ModelUnavailable(
                f"model_id {redact_address(self.config.model_id)!r}: {model.path} has no"
                " config.json: vLLM takes a directory as the hub has it"
            )
        adapters = {}
        for name, wanted in self.config.lora_adapters.items():
            with naming(name):
                path, revision = fetch_source(self.config, wanted, models, self.echo)
                adapter = lora_adapter.read_adapter(path)
            adapters[name] = path, entry_of(wanted, adapter, revision)
        inputs = [
            self.config.fingerprint,
            [str(model.path), listing(model.path)],
            [[entry.model_dump(), listing(path)] for path, entry in adapters.values()],
            python_of(self.python),
            gpu_names(),
            installed_driver().version,
            __version__,
        ]
        compiled = Stage("compile", inputs, partial(self._compile, model, adapters))
        at = self.workspace.output(compiled)
        proven = Stage("prove", [compiled.key], partial(self._prove, at))
        text = self.config.to_yaml()
        others = []
        for tar in self._added:
            run = partial(sealed_package.unpack_seals, tar, self.config, model)
            others.append(Stage("seals", [sha256_of(tar), text, model.revision], run))
        places = [self.workspace.output(stage) for stage in (proven, *others)]
        run = partial(self._finish, model, adapters, at, *places)
        keys = [stage.key for stage in (proven, *others)]
        return [*others, compiled, proven, Stage(package.ENGINE, [text, *keys], run)]

    def _compile(self, model: FetchedModel, adapters: Adapters, root: Path) -> None:
        """Start the engine until a start compiles nothing, and take what the compilers left."""
        engine = root / package.ENGINE
        engine.mkdir()
        for name, file in files_of(model.path).items():
            hidden = any(part.startswith(".") for part in name.split("/"))
            if not (hidden or name in _OURS or name.startswith(_OUR_FOLDERS)):
                link(file, engine / name)
        arguments: dict[str, Any] = dict(self.config.args)
        if adapters:
            arguments["enable_lora"] = True
            places = {name: adapter_directory(name) for name in sorted(adapters)}
            (engine / LORA_FILE).write_text(as_json(places), "utf-8")
        for name, (path, _) in adapters.items():
            for each in lora_adapter.FILES:
                link(path / each, engine / adapter_directory(name) / each)
        (engine / MODEL_FILE).write_text(as_json(arguments), "utf-8")
        family = VLLMFamily.open(engine)
        if family.model.embeds:
            raise BuildConfigInvalid("args.runner: an engine that makes no text has no canary")
        prompt = EngineTokenizer.load(family.tokenizer_dir).encode(self.config.canary.prompt)
        caches, first = root / "compiled", None
        for parameters in self._variants():
            before = -1
            for _ in range(_MOST_STARTS):
                started = self._start(root, engine, caches, prompt, parameters)
                first = first or started
                if started.held == before:
                    break
                before = started.held
        assert first is not None
        name = seal_name(first.environment)
        for cache in sorted(caches.iterdir()):
            sealed_caches.collect(cache, engine / seal.DIRECTORY / name)
        shutil.rmtree(caches)
        found = _Compiled(started=first, prompt=prompt)
        (root / _COMPILED).write_text(found.model_dump_json(), "utf-8")

    def _variants(self) -> Sequence[dict[str, str]]:
        return ({}, {PARKABLE: "true"}) if self.config.spare else ({},)

    def _prove(self, compiled: Path, root: Path) -> None:
        """Start the engine from its seal in another place, where nothing may be compiled.

        Raises:
            BuildStepFailed: something was, or the answer is another one.
        """
        known = _Compiled.model_validate_json((compiled / _COMPILED).read_bytes())
        name, wanted = known.name, known.started
        sealed = compiled / package.ENGINE / seal.DIRECTORY
        made = Seal(
            environment=wanted.environment,
            driver=sealed_package.oldest_driver(wanted),
            aot=sealed_caches.hashes_of(sealed / name),
            compile_seconds=wanted.seconds,
            seconds=0.0,
            apart=False,
        )
        if not made.aot:
            self.echo("[prove] warning: vLLM compiled no model: the seal has only kernels")
        engine, caches = root / "proof" / package.ENGINE, root / "proof" / "caches"
        for file, path in files_of(compiled / package.ENGINE).items():
            (engine / file).parent.mkdir(parents=True, exist_ok=True)
            if seal_of(file):
                shutil.copyfile(path, engine / file)
            else:
                link(path, engine / file)
        manifest = sealed_package.manifest_of(self.config, None, engine, {name: made})
        held = [path.resolve() for path in files_of(engine).values()]
        entries = {
            file: package.entry_of(engine / file) for file in files_of(engine) if seal_of(file)
        }
        text = manifest.model_copy(update={"files": entries}).to_json()
        (engine / MANIFEST_NAME).write_text(text, "utf-8")
        ours = isolated_python.environment_of(self.python, root)
        other = other_user.command(self.python, ours, held, caches)
        made = made.model_copy(update={"apart": bool(other)})
        self.echo(f"[prove] by {'another' if other else 'the same'} user, at another path")
        trusted = hashlib.sha256(text.encode()).hexdigest()
        parameters = {compiler_caches.TRUSTED: trusted, compiler_caches.REQUIRED: "true"}
        expected = sum(map(len, sealed_caches.compiled(sealed / name)))
        more = {"VLLM_FORCE_AOT_LOAD": "1"} if made.aot else {}
        if other:
            more["HOME"] = str(caches)
        seconds: list[float] = []
        for variant in self._variants():
            given = {**parameters, **variant}
            started = self._start(root, engine, caches, known.prompt, given, more, other)
            seconds.append(started.seconds)
            if started.output_ids != wanted.output_ids:
                raise BuildStepFailed(
                    f"prove: the canary was answered with {started.output_ids}, and with"
                    f" {wanted.output_ids} while it was compiled: the engine cannot be proven"
                )
            if started.held != expected:
                raise BuildStepFailed(
                    f"prove: {started.held - expected} kernels were compiled, for which {expected}"
                    " were sealed: a start from the seal would compile them, too"
                )
        shutil.rmtree(root / "proof")
        made = made.model_copy(update={"seconds": seconds[0]})
        self.echo(f"[prove] started in {seconds[0]:g} s, where compiling took {wanted.seconds:g} s")
        (root / _PROVEN).write_text(made.model_dump_json(), "utf-8")

    def _finish(self, model: FetchedModel, adapters: Adapters, *places: Path) -> None:
        """Make the engine's directory, with its seal and those of other engine.tars."""
        compiled, proven, *others, root = places
        known = _Compiled.model_validate_json((compiled / _COMPILED).read_bytes())
        engine = root / package.ENGINE
        for name, path in files_of(compiled / package.ENGINE).items():
            (engine / name).parent.mkdir(parents=True, exist_ok=True)
            (link if path.is_symlink() else link_or_copy)(path, engine / name)
        seals = {known.name: Seal.model_validate_json((proven / _PROVEN).read_bytes())}
        for other in others:
            sealed_package.add_seals(other, engine, seals)
        manifest = sealed_package.manifest_of(self.config, model.revision, engine, seals)
        weights = None
        if self.config.weights == "reference":
            weights = sealed_package.take_weights(engine, self.config, model)
        entries = {name: entry for name, (_, entry) in adapters.items()}
        manifest = manifest.model_copy(update={"weights": weights, "lora_adapters": entries})
        canary = Canary(input_ids=known.prompt, output_ids=known.started.output_ids)
        package.finish(engine, self.config, canary, manifest)

    def _start(
        self,
        root: Path,
        engine: Path,
        caches: Path,
        prompt: list[int],
        parameters: dict[str, str],
        environment: dict[str, str] | None = None,
        begin: Sequence[str] = (),
    ) -> Started:
        """Start the engine in `engine` as a server does, with its caches below `caches`."""
        name = "compile" if environment is None else "prove"
        given = {
            "engine_dir": str(engine),
            compiler_caches.DIRECTORY: str(caches),
            compiler_caches.MOST_BYTES: _ROOM,
            **parameters,
        }
        words = [json.dumps(given), json.dumps(prompt), str(self.config.canary.tokens)]
        script = Script(
            name="seal_start",
            argv=(*begin, self.python, "-m", "cog_triton.engines.vllm.seal_start", *words),
            path=Path(self.python),
            python=self.python,
        )
        step = Step(
            name=name,
            script=script,
            args={},
            input=str(engine),
            output_dir=str(caches),
            env={**self.config.variables, **(environment or {})},
            timeout=self.config.timeout,
        )
        token = self.config.request.token or os.environ.get("HF_TOKEN", "").strip()
        secrets = {"HF_TOKEN": token} if token else {}
        log = self.workspace.log(name, root)
        stream = run_step(step, root, log, self.echo, secrets)
        for line in reversed(stream.last):
            if line.startswith('{"output_ids"'):
                return Started.model_validate_json(line)
        raise BuildStepFailed(f"{name}: the engine ended without an answer{stream.end}")
