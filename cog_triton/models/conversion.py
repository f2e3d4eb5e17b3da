"""Conversion of a model into an OpenVINO engine, once, by the builder's own steps."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cog_triton.artifact import engine_tar
from cog_triton.builder.workspace import Workspace
from cog_triton.download import disk_space
from cog_triton.download.transfer_progress import Echo

if TYPE_CHECKING:
    from cog_triton.builder.config import BuildConfig

MAX_SEQ_LEN = 8192
"""Longest sequence of a converted engine, in tokens; less where the model has less."""
# Per byte of weights of 16 bits: the engine at 8 bits; and the engine of the build with its GGUF or
# its tar, which are there meanwhile.
KEPT, PASSING = 0.6, 1.2


@dataclass(frozen=True)
class Conversion:
    """A model to convert: as a build config calls it, and by what it is told from others.

    Attributes:
        revision: of a hub's model, a commit.
        identity: what tells its files from others': a commit, or names, sizes and times.
        max_positions: the model's own limit of a sequence, in tokens.
    """

    model_id: str
    revision: str | None
    identity: str
    max_positions: int

    def config(self) -> BuildConfig:
        """The build config: what configs/build/smollm2-135m-cpu.yaml is for the demo model."""
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
                        "max_seq_len": min(MAX_SEQ_LEN, self.max_positions),
                    },
                },
            }
        )

    def engine(self, store: Path) -> Path:
        """Where the engine is, or will be: by the config, the model and the converter."""
        from cog_triton.builder import step_cache  # tokenizers, engine families, and so NumPy
        from cog_triton.builder.plan import OWN

        scripts = sorted((OWN / "openvino").glob("*.py"))
        code = [[p.name, hashlib.sha256(p.read_bytes()).hexdigest()] for p in scripts]
        of = [self.config().to_yaml(), self.identity, step_cache.versions(), code]
        digest = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
        return store.absolute() / "engines" / digest[:16]

    def run(self, store: Path, echo: Echo) -> Path:
        """Convert it, unless that was done; returns the engine directory.

        What a killed conversion finished is not done again; a second process waits for the first.

        Raises:
            UserError, FrameworkError: see `run_build`.
        """
        target = self.engine(store)
        if target.is_dir():
            return target
        doing = f"converting {self.model_id}"
        with disk_space.writing(target, self.model_id, echo, threading.Event(), doing):
            if not target.is_dir():
                self._convert(target, Workspace(store), echo)
        return target

    def _convert(self, target: Path, workspace: Workspace, echo: Echo) -> None:
        from cog_triton.builder.plan import Families, make_plan
        from cog_triton.builder.run import run_build, stages  # engine families, and so NumPy
        from cog_triton.system.terminal_progress import BuildProgress

        config = self.config()
        plan = make_plan(config, workspace.of(config.fingerprint), Families())
        tar = workspace.root / f"{target.name}.tar"
        with BuildProgress(echo, len(stages(plan))) as progress:
            run_build(plan, workspace, tar, echo=progress.echo, begin=progress.begin)
        for killed in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(killed, ignore_errors=True)
        engine_tar.unpack(tar, target)
        tar.unlink()
        shutil.rmtree(plan.work_dir, ignore_errors=True)


def files_identity(path: Path) -> str:
    """Identity of the model at `path`, a file or a directory: names, sizes and times."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files if file.is_file()]
    return json.dumps([str(path), [[f.name, s.st_size, s.st_mtime_ns] for f, s in stats]])
