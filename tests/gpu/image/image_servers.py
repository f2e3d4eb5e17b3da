"""Servers of an image's root file system and of its peer's, each as a container."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import multicast
from servers import START_TIMEOUT_S, Ours, VLLMServe, vllm_words

from cog_triton.system.ports import free_ports

_CONTAINER = Path(__file__).with_name("container.py")
_WORK = "/opt/cog-triton/work"
USER = 1000
_PEER = ("/opt/cog-triton/bin/python", "-m")


@dataclass(frozen=True)
class Container:
    """What runs commands over `root`; `config` is the image's, `shared` a directory for caches."""

    root: Path
    config: Mapping[str, Any]
    models: Path
    shared: Path
    read_only: bool = False
    beside: tuple[Path, ...] = ()
    """Directories that are there besides, at their own place."""

    def command(
        self, words: Sequence[str], work: Path, environment: Mapping[str, str]
    ) -> list[str]:
        """The command line that runs `words` as the image's user, and what it keeps in `work`."""
        for directory in (work, self.shared):
            directory.mkdir(parents=True, exist_ok=True)
            _give(directory)
        given = dict(item.split("=", 1) for item in self.config["Env"])
        caches = {
            "VLLM_CACHE_ROOT": "vllm",
            "TRITON_CACHE_DIR": "triton",
            "CUDA_CACHE_PATH": "cuda",
        }
        given |= {name: f"/cache/{place}" for name, place in caches.items()}
        given |= {**multicast.OFF, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **environment}
        options = [f"--env={name}={value}" for name, value in given.items()]
        options += [f"--bind={work}:{_WORK}", f"--bind={self.shared}:/cache"]
        options += [f"--read={path}" for path in (self.models, *self.beside)]
        options.append(f"--user={USER}")
        options += [f"--workdir={self.config['WorkingDir']}"]
        options += ["--read-only"] * self.read_only
        return [sys.executable, str(_CONTAINER), f"--root={self.root}", *options, "--", *words]

    def ours(self, name: str, engine: Path, logs: Path, **environment: str) -> Ours:
        """The image's own entry point, serving `engine`."""
        work = logs / name / "work"
        work.mkdir(parents=True, exist_ok=True)
        cog, openai, triton, grpc, measures = free_ports(5)
        values = {
            "COG_HOST": "127.0.0.1",
            "PORT": str(cog),
            "OPENAI_PORT": str(openai),
            "TRITON_HTTP_PORT": str(triton),
            "TRITON_GRPC_PORT": str(grpc),
            "TRITON_METRICS_PORT": str(measures),
            "COG_WEIGHTS": str(engine),
            "TRITON_START_TIMEOUT": str(START_TIMEOUT_S),
            "SERVED_MODEL_NAME": "verify",
            **environment,
        }
        words = [*self.config["Entrypoint"], *self.config["Cmd"]]
        return Ours(
            name,
            self.command(words, work, values),
            {},
            logs / name / "serve.log",
            f"http://127.0.0.1:{cog}/health-check",
            b'"READY"',
            cog=cog,
            openai=openai,
            triton=triton,
            metrics=measures,
        )

    def vllm(
        self, name: str, engine: Path, logs: Path, *, rust: bool = False, **environment: str
    ) -> VLLMServe:
        """``vllm serve`` with its front end in Python or in Rust."""
        (port,) = free_ports(1)
        environment |= {"VLLM_USE_RUST_FRONTEND": "1"} if rust else {}
        words = [*_PEER, *vllm_words(engine, port, rust=rust)]
        command = self.command(words, logs / name / "work", environment)
        health = f"http://127.0.0.1:{port}/health"
        return VLLMServe(name, command, {}, logs / name / "serve.log", health, openai=port)


def _give(directory: Path) -> None:
    os.chown(directory, USER, USER)
