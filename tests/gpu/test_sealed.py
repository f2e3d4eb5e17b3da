"""A sealed engine is built and proven here, starts from empty caches, and compiles nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cuda_driver
import pytest
from gpu_servers import Card, Server, environment_of, served
from sealed_engines import H200, digest_of, gpu_python, unpacked
from vllm_engines import hugging_face

pytestmark = pytest.mark.gpu

CANARY_TOKENS = 64
_BUILD_S = 400


def compiled(*places: Path) -> set[str]:
    """Files that compilers have made, each by its name and its directory's."""
    return {
        "/".join(path.parts[-2:])
        for place in places
        for path in place.rglob("*")
        if path.suffix in (".cubin", ".so") or path.name in ("model", "autotune.json")
    }


def test_a_sealed_engine_compiles_nothing_and_says_the_same(
    card: Card, smollm2: Path, tmp_path: Path
) -> None:
    environment, driver = dict(environment_of(card)), {}
    model = smollm2
    if card.rehearsal:
        if not cuda_driver.has_compiler():
            pytest.skip("a double of NVIDIA's driver needs a C compiler")
        model = hugging_face(tmp_path / "model")
        driver["COG_TRITON_VLLM_PYTHON"] = str(gpu_python(tmp_path / "python"))
        environment |= cuda_driver.gpu_driver(tmp_path / "driver", gpu_name=H200)
    arguments = {"gpu_memory_utilization": 0.4} if card.rehearsal else card.arguments()
    config = {
        "engine": "vllm",
        "model_id": str(model),
        "args": arguments,
        "sealed": "required",
        "canary": {"prompt": "Once upon a time", "tokens": CANARY_TOKENS},
    }
    (tmp_path / "seal.yaml").write_text(json.dumps(config, indent=1))
    tar = tmp_path / "engine.tar"
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache")}
    home["COG_TRITON_WORK_DIR"] = str(tmp_path / "build")
    command = [sys.executable, "-m", "cog_triton", "build", "seal.yaml", "-o", str(tar)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment, **driver, **home},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_BUILD_S,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    print(done.stdout[-1500:])

    engine = unpacked(tar, tmp_path / "unpacked")
    sealed = compiled(engine / "sealed")
    assert sealed
    place = tmp_path / "served"
    place.mkdir()
    pinned = {"SEAL": "required", "SEAL_SHA256": digest_of(engine), "CANARY": "require"}
    homes = {"HOME": str(place), "XDG_CACHE_HOME": str(place / ".cache"), **driver}
    server = Server(place / "work", tar, card, caches=None, **pinned, **homes)
    with served(server):
        assert f"the canary of {CANARY_TOKENS} tokens was answered as built" in server.output
        assert server.complete("Once upon a time", 64)
        # Triton unpacks libraries of its launchers there, which are in the seal.
        assert compiled(place / ".cache", server.work_dir / "compiler-caches") - sealed == set()
