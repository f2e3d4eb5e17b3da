"""Conversion of a model into an OpenVINO engine, once, by the builder's own steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cog_triton.builder.workspace import Workspace, digest
from cog_triton.download.transfer_progress import Echo

if TYPE_CHECKING:
    from cog_triton.builder.config import BuildConfig

MAX_SEQ_LEN = 8192
"""Longest sequence of a converted engine, in tokens; less where the model has less."""
SHARE = 0.6
"""Bytes of an engine at 8 bits for a byte of weights at 16."""


@dataclass(frozen=True)
class Conversion:
    """A model to convert: as a build config calls it, and by what it is told from others.

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
