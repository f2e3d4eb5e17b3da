"""A sealed engine, built by the command line or by a prediction of the builder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from arguments import REPOSITORY
from servers import Server, stopped_at_the_end

from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.system.ports import free_ports

_BUILD_S = 300.0


class Sealed:
    """An engine.tar of `model` in `place`, required to be sealed; `told` is what its build said."""

    def __init__(self, model: Path, place: Path, environment: Mapping[str, str]) -> None:
        self._place, self._environment = place, {**os.environ, **environment}
        arguments = json.loads((model / "model.json").read_text("utf-8"))
        asked = {"engine": "vllm", "model_id": str(model), "args": arguments, "sealed": "required"}
        self._config = json.dumps(asked, indent=1)  # of several lines, so that it is no path
        self._tar = place / "engine.tar"
        self.told = ""

    def build(self) -> Path | None:
        """Build it by ``cog-triton build``; the engine.tar, None if that fails."""
        config = self._place / "seal.yaml"
        config.write_text(self._config, "utf-8")
        command = [sys.executable, "-m", "cog_triton", "build", str(config), "-o", str(self._tar)]
        done = subprocess.run(
            command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.told = done.stdout
        return self._tar if done.returncode == 0 else None

    def predict(self) -> Path | None:
        """Build it by a prediction of the builder's Cog project, which a builder image serves."""
        (port,) = free_ports(1)
        made = self._place / "out"
        made.mkdir()
        own = {"PORT": str(port), "COG_TRITON_OUTPUT_DIR": str(made)}
        own["COG_PREDICT_TYPE_STUB"] = "predict.py:Predictor"
        own["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        command = [sys.executable, "-m", "cog_triton.serve", "--cog-only"]
        health = f"http://127.0.0.1:{port}/health-check"
        log = self._place / "builder" / "serve.log"
        environment = {**self._environment, **own}
        server = Server("builder", command, environment, log, health, b'"READY"')
        before = Path.cwd()
        os.chdir(REPOSITORY / "builder")
        try:
            server.launch()
        finally:
            os.chdir(before)
        with stopped_at_the_end(server):
            server.wait()
            url = f"http://127.0.0.1:{port}/predictions"
            began = time.monotonic()
            answer = httpx.post(url, json={"input": {"config": self._config}}, timeout=_BUILD_S)
            print(f"  predicted in {time.monotonic() - began:.1f} s", flush=True)
            self.told = log.read_text("utf-8", "replace") + answer.text[-2000:]
            if answer.json().get("status") != "succeeded":
                return None
            found = next(iter(made.rglob("*.tar")), None)
            if found:
                found.rename(self._tar)
            return self._tar if found else None

    def contents(self) -> dict[str, Any]:
        """Bytes of what was compiled, and what the manifest says of it."""
        with tarfile.open(self._tar) as members:
            sizes = [item.size for item in members if item.name.startswith("sealed/")]
        seals = json.loads(self._manifest()).get("seals")
        return {"compiled bytes": sum(sizes), "seals": seals}

    def files(self) -> set[str]:
        """Names of what was compiled, each with the directory's that it is in."""
        with tarfile.open(self._tar) as members:
            names = [item.name for item in members if item.name.startswith("sealed/")]
        return {"/".join(Path(name).parts[-2:]) for name in names}

    def digest(self) -> str:
        """The manifest's, by which who starts it pins it."""
        return hashlib.sha256(self._manifest()).hexdigest()

    def _manifest(self) -> bytes:
        with tarfile.open(self._tar) as members:
            read = members.extractfile(MANIFEST_NAME)
            return read.read() if read else b""


def gpu_double(directory: Path) -> dict[str, str]:
    """Environment in which builds, and a Python of vLLM, see a GPU."""
    sys.path.append(str(REPOSITORY / "tests"))
    from sealed_engines import H200, gpu_driver, gpu_python

    python = gpu_python(directory / "python")
    given = gpu_driver(directory / "driver", gpu_name=H200)
    return {**given, "COG_TRITON_VLLM_PYTHON": str(python)}
