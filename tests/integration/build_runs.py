"""Builds run as processes in a directory of their own, and configs for them."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from stack import REPOSITORY, processes_of, wait_until
from tensorrt_llm_tree import Installation


@dataclass
class BuildRuns:
    """A directory with a Llama and a GPT-2, where ``cog-triton build`` runs."""

    directory: Path
    tree: Installation | None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        of_tree = {} if self.tree is None else self.tree.environment
        mark = {"COG_TRITON_WORK_DIR": str(self.directory)}  # processes_of looks for it
        return {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            **mark,
            **of_tree,
            **self.environment,
        }

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "cog_triton", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*words),
            cwd=self.directory,
            env=self.variables,
            capture_output=True,
            text=True,
        )
        assert not processes_of(self.directory)
        return done

    def config(self, value: dict[str, Any], name: str = "config") -> str:
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(value, sort_keys=False))
        return str(path)

    def build(self, value: dict[str, Any], *words: str, tar: str = "engine.tar") -> list[str]:
        """Build, and return the lines of stdout."""
        done = self.run("build", self.config(value), "-o", tar, "--work-dir", "work", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    @contextmanager
    def killed(self, value: dict[str, Any]) -> Iterator[None]:
        """Run a build of `value` that is ended by SIGKILL and leaves no process."""
        words = self.command("build", self.config(value), "--work-dir", "work")
        process = subprocess.Popen(
            words, cwd=self.directory, env=self.variables, stdout=subprocess.DEVNULL
        )
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
        wait_until(lambda: not processes_of(self.directory))

    def refused(self, value: dict[str, Any], *words: str) -> str:
        """Build `value`, which fails without an engine; returns the error."""
        done = self.run("build", self.config(value), "--work-dir", "work", *words)
        assert done.returncode == 1, done.stdout
        assert not (self.directory / "engine.tar").exists()
        assert done.stderr.startswith("error: E"), done.stderr
        return done.stderr.removeprefix("error: ")

    def steps(self, name: str) -> list[Path]:
        """Files of this name in the outputs of stages, unfinished ones too."""
        return sorted((self.directory / "work" / "steps").glob(f"*/{name}"))


def packed(model: Path, tar: Path) -> Path:
    """The model's files at the top of a tar."""
    with tarfile.open(tar, "w") as file:
        for path in sorted(model.iterdir()):
            file.add(path, path.name)
    return tar


def llama(tp: int = 1, pp: int = 1, **changes: Any) -> dict[str, Any]:
    """Three steps, by the legacy name of the first one."""
    parallel = {"tp_size": tp, "pp_size": pp}
    return {
        "model_id": "tiny-llama",
        "example_name": "llama",
        "convert_to_ft": {
            "script": "convert_checkpoint.py",
            "output_dir": "checkpoint",
            "args": {
                "model_dir": "model",
                "output_dir": "checkpoint",
                "dtype": "float16",
                **parallel,
            },
        },
        "quantize": {
            "script": "quantize.py",
            "output_dir": "quantized",
            "args": {
                "model_dir": "model",
                "output_dir": "quantized",
                "qformat": "fp8",
                "calib_size": 4,
                **parallel,
            },
        },
        "build": build_step("quantized"),
        **changes,
    }


def gpt(tp: int = 1, pp: int = 1, **limits: Any) -> dict[str, Any]:
    """Two steps."""
    args = {"model_dir": "model", "output_dir": "checkpoint", "dtype": "float16"}
    return {
        "model_id": "tiny-gpt2",
        "example_name": "gpt",
        "convert": {
            "script": "convert_checkpoint.py",
            "output_dir": "checkpoint",
            "args": {**args, "tp_size": tp, "pp_size": pp},
        },
        "build": build_step("checkpoint", **limits),
    }


def build_step(source: str, **limits: Any) -> dict[str, Any]:
    return {
        "executable": "trtllm-build",
        "output_dir": "engine",
        "args": {
            "checkpoint_dir": source,
            "output_dir": "engine",
            "max_batch_size": 8,
            "max_input_len": 32,
            "max_seq_len": 48,
            **limits,
        },
    }
