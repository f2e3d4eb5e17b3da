"""Sealed engines of the double of vLLM, built on GPUs that a double of NVIDIA's driver has."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from cuda_driver import gpu_driver
from stack import Stack
from vllm_engines import calls, double_environment, hugging_face

from cog_triton.artifact.engine_manifest import MANIFEST_NAME, FileEntry, Manifest, sha256_of

H200 = "NVIDIA H200"
SEAL = "nvidia-h200-sm90-x1"
CONFIG = {"engine": "vllm", "model_id": "./model", "canary": {"prompt": "abc", "tokens": 4}}


def gpu_python(directory: Path, **facts: object) -> Path:
    """A Python that alone sees GPUs, see `gpu_driver`: Triton would call more of CUDA."""
    directory.mkdir(parents=True, exist_ok=True)
    given = gpu_driver(directory / "driver", **{"gpu_name": H200, **facts})
    python = directory / "bin" / "python"
    python.parent.mkdir()
    lines = [f"export {name}='{value}'" for name, value in given.items()]
    text = "\n".join(["#!/bin/sh", *lines, f'exec {sys.executable} "$@"', ""])
    python.write_text(text)
    python.chmod(0o755)
    return python


@dataclass
class SealedBuilds:
    """A directory with a model, where ``cog-triton build`` seals it on `facts` of a GPU."""

    directory: Path
    facts: dict[str, object] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hugging_face(self.directory / "model")
        given = {"gpu_name": H200, **self.facts}
        self.python = gpu_python(self.directory / "python", **given)
        self.journal = self.directory / "journal"
        self.environment = {
            **os.environ,
            **double_environment(self.journal),
            **gpu_driver(self.directory / "driver", **given),
            "COG_TRITON_WORK_DIR": str(self.directory / "home"),
            "COG_TRITON_VLLM_PYTHON": str(self.python),
        }

    def command(self, config: dict[str, Any], *words: str, tar: str = "engine.tar") -> list[str]:
        (self.directory / "config.yaml").write_text(yaml.safe_dump(config))
        begin = [sys.executable, "-m", "cog_triton", "build", "config.yaml"]
        return [*begin, "-o", tar, "--work-dir", "work", *words]

    def run(
        self, config: dict[str, Any] | None = None, *words: str, tar: str = "engine.tar"
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(config or CONFIG, *words, tar=tar),
            cwd=self.directory,
            env={**self.environment, **self.variables},
            capture_output=True,
            text=True,
        )

    def build(
        self, config: dict[str, Any] | None = None, *words: str, tar: str = "engine.tar"
    ) -> Path:
        done = self.run(config, *words, tar=tar)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.directory / tar

    def compiled(self, what: str) -> list[str]:
        return compiled(self.journal, what)


class SealedStack(Stack):
    """``cog-triton serve engine.tar``; the engine alone sees the GPU that it was sealed on."""

    def __init__(self, directory: Path, builds: SealedBuilds, engine: Path, **more: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.journal = directory / "journal"
        given = double_environment(self.journal, COG_TRITON_VLLM_PYTHON=str(builds.python))
        super().__init__(directory / "work", str(engine), **given, **more)


def compiled(journal: Path, what: str) -> list[str]:
    """What the double compiled, or loaded: aot, kernel, measured, read."""
    return [call["name"] for call in calls(journal, "compile") if call["what"] == what]


def unpacked(tar: Path, directory: Path) -> Path:
    """The engine directory of a tar."""
    with tarfile.open(tar) as file:
        file.extractall(directory, filter="data")
    return directory


def manifest_of(directory: Path) -> Manifest:
    """The manifest of an engine directory."""
    return Manifest.model_validate_json((directory / MANIFEST_NAME).read_bytes())


def digest_of(directory: Path) -> str:
    """The digest by which an engine directory is pinned."""
    return hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()


def rewritten(directory: Path, manifest: Manifest) -> str:
    """Write another manifest into an engine directory; returns its digest."""
    (directory / MANIFEST_NAME).write_text(manifest.to_json())
    return digest_of(directory)


def copied(directory: Path, to: Path) -> Path:
    """A copy of an engine directory, at another path."""
    return Path(shutil.copytree(directory, to))


def sealed_file(engine: Path, kind: str) -> Path:
    """First file of the seal with a name of this kind."""
    return next((engine / "sealed" / SEAL).rglob(kind))


def lying(engine: Path, name: str, content: bytes) -> None:
    """Give a file of the seal other bytes, and the manifest their sum."""
    path = engine / name
    path.write_bytes(content)
    entry = FileEntry(size=len(content), sha256=sha256_of(path))
    manifest = manifest_of(engine)
    rewritten(engine, manifest.model_copy(update={"files": {**manifest.files, name: entry}}))
