"""Sealed vLLM engines that follow each other: each starts from its own seal, never the other's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from cuda_driver import CudaDriver, has_compiler
from sealed_engines import (
    CONFIG,
    SealedBuilds,
    SealedStack,
    compiled,
    digest_of,
    manifest_of,
    unpacked,
)
from stack import text_of
from vllm_engines import hugging_face

from cog_triton.engines.vllm.sealed_caches import AOT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not has_compiler(), reason="needs a C compiler"),
]
H100 = {"gpu_name": "NVIDIA H100 80GB HBM3"}
"""What the driver that parks processes has."""


class Pair:
    """Two sealed engines of different limits, and the digests that pin both."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.builds = SealedBuilds(directory, H100)
        self.engines = []
        for name, length in (("a", 64), ("b", 96)):
            hugging_face(directory / "models" / name)
            arguments = {"max_model_len": length, "gpu_memory_utilization": 0.9}
            given = {**CONFIG, **config, "model_id": f"./models/{name}", "args": arguments}
            tar = self.builds.build(given, tar=f"{name}.tar")
            self.engines.append(unpacked(tar, directory / name))
        self.pins = ",".join(map(digest_of, self.engines))

    def hashes(self, number: int) -> set[str]:
        """vLLM's hashes of one of them."""
        (one,) = manifest_of(self.engines[number]).seals.values()
        return set(one.aot)

    def used(self, work_dir: Path) -> list[set[str]]:
        """vLLM's hashes in the caches of each engine, in the order in which they were started."""
        caches = sorted(
            (work_dir / "compiler-caches").iterdir(), key=lambda one: one.stat().st_mtime
        )
        return [{path.name for path in (one / AOT).iterdir()} for one in caches]


def nothing_compiled(journal: Path) -> bool:
    return not [made for what in ("aot", "kernel", "measured") for made in compiled(journal, what)]


def test_a_roll_starts_the_next_engine_from_its_own_seal(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "builds")
    first, second = pair.engines
    stack = SealedStack(tmp_path, pair.builds, first, SEAL_SHA256=pair.pins, SEAL="required")
    with stack.served():
        assert text_of(stack.predict("abc", max_tokens=4)) == "abca"
        command = [sys.executable, "-m", "cog_triton", "roll", str(second)]
        rolled = subprocess.run(
            command, env=stack.environment, capture_output=True, text=True, timeout=300
        )
        assert rolled.returncode == 0, rolled.stdout + rolled.stderr
        assert text_of(stack.predict("abc", max_tokens=4)) == "abca"
        kernels = [Path(path) for path in compiled(stack.journal, "read")]
        assert nothing_compiled(stack.journal)
        assert len(kernels) == 2 * 4
        assert {*kernels[:4]}.isdisjoint(kernels[4:])
        assert pair.used(stack.work_dir) == [pair.hashes(0), pair.hashes(1)]
        assert pair.hashes(0).isdisjoint(pair.hashes(1))

        # One whose seal is not trusted is not taken, and what serves stays.
        third = unpacked(pair.builds.directory / "a.tar", tmp_path / "third")
        manifest = third / "cog-triton.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text())))
        command[-1] = str(third)
        refused = subprocess.run(
            command, env=stack.environment, capture_output=True, text=True, timeout=300
        )
        assert refused.returncode == 1
        assert "E1305" in refused.stdout + refused.stderr
        assert "a seal is required" in refused.stdout + refused.stderr
        assert text_of(stack.predict("abc", max_tokens=4)) == "abca"


def test_engines_that_take_turns_on_a_gpu_have_a_seal_each(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "builds", spare=True)
    driver = CudaDriver(tmp_path / "driver")
    given = {"SWAP_RESIDENCE": "0.5", "SEAL_SHA256": pair.pins, "SEAL": "required"}
    stack = SealedStack(tmp_path, pair.builds, pair.engines[0], **given, **driver.environment)
    del stack.environment["COG_TRITON_VLLM_PYTHON"]  # all of it has the driver that parks
    stack.command = [*stack.command[:4], *map(str, pair.engines), "--swap"]
    with stack.served():
        for model in ("./models/a", "./models/b") * 2:
            body = {"model": model, "prompt": "abc", "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{stack.own}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == "abca"
        states = sorted(state for state, _ in driver.processes().values())
        assert states == ["CHECKPOINTED", "RUNNING"]
        assert nothing_compiled(stack.journal)
        assert len(compiled(stack.journal, "read")) == 2 * 4  # a swap starts none
        assert pair.used(stack.work_dir) == [pair.hashes(0), pair.hashes(1)]
