"""Libraries pruned for this GPU compute the same bits; pruned for another one they fail.

They are copies of those of --whole-python, a Python whose PyTorch has code for every GPU: the one
of a kit has been pruned already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gpu_servers import NO_MULTICAST, Card

pytestmark = pytest.mark.gpu

OPERATIONS = Path(__file__).with_name("prune_operations.py")
FIND = """
import importlib.util, json
found = {name: importlib.util.find_spec(name) for name in ("torch", "vllm")}
print(json.dumps({name: spec.origin for name, spec in found.items() if spec}))
"""


@dataclass(frozen=True)
class Whole:
    """A Python, and the directories of its torch and its vllm, if it has that."""

    python: str
    packages: dict[str, Path]

    def results(self, place: Path, packages: dict[str, Path]) -> dict[str, Any]:
        """Digests by library and operation, computed by these packages, in a new process."""
        cache = place / "cuda-cache"
        cache.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            **NO_MULTICAST,
            "PYTHONPATH": str(packages["torch"].parent),
            "CUDA_CACHE_PATH": str(cache),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        command = [self.python, OPERATIONS, *filter(None, [packages.get("vllm")])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        (torch,) = [path for path in told["libraries"] if path.endswith("/libtorch_cuda.so")]
        assert Path(torch).resolve().is_relative_to(packages["torch"].resolve())
        found: dict[str, Any] = told["results"]
        return found

    def pruned(self, sm: int, place: Path) -> tuple[dict[str, Path], set[str]]:
        """Copies for `sm`, and the names of the files that were pruned."""
        command = [sys.executable, "-m", "cog_triton", "prune", f"--sm={sm}", "--json"]
        command += [f"--output={place}", *map(str, self.packages.values())]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        site = self.packages["torch"].parent
        for beside in site.iterdir():  # torch finds cuBLAS and the like there
            if beside.name == "nvidia" or beside.name.endswith(".libs"):
                (place / beside.name).symlink_to(beside)
        rows = json.loads(done.stdout)["files"]
        names = {Path(row["path"]).name for row in rows if row["action"] == "pruned"}
        return {name: place / name for name in self.packages}, names


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, card: Card) -> Whole:
    if card.rehearsal:
        pytest.skip("needs a GPU: the double of vLLM computes nothing")
    python = request.config.getoption("--whole-python") or sys.executable
    told = subprocess.run([python, "-c", FIND], capture_output=True, text=True, check=True)
    origins = json.loads(told.stdout.splitlines()[-1])
    if "torch" not in origins:
        pytest.skip(f"{python} has no PyTorch: name another --whole-python")
    return Whole(python, {name: Path(origin).parent for name, origin in origins.items()})


@pytest.fixture(scope="module")
def original(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results that the libraries as installed give twice; others prove nothing."""
    place = tmp_path_factory.mktemp("original")
    one, two = (whole.results(place, whole.packages) for _ in range(2))
    usable = {
        group: {
            name: result
            for name, result in results.items()
            if result == two[group][name] and not result.startswith("error")
        }
        for group, results in one.items()
    }
    assert [group for group, results in usable.items() if not results] == []
    return usable


@pytest.fixture(scope="module")
def pruned(whole: Whole, card: Card, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies for this GPU; skips if nothing could be pruned."""
    packages, names = whole.pruned(card.sm, tmp_path_factory.mktemp("pruned"))
    if "libtorch_cuda.so" not in names:
        pytest.skip(f"{whole.python}'s PyTorch is pruned already: name another --whole-python")
    return packages


def test_pruned_for_this_gpu_every_result_has_the_same_bits(
    pruned: dict[str, Path], whole: Whole, original: dict[str, Any], tmp_path: Path
) -> None:
    found = whole.results(tmp_path, pruned)
    usable = {group: {name: found[group][name] for name in of} for group, of in original.items()}
    assert usable == original


@pytest.mark.usefixtures("pruned")
def test_pruned_for_another_gpu_they_fail(
    whole: Whole, original: dict[str, Any], card: Card, tmp_path: Path
) -> None:
    """A kernel that is not there is an error only if its launch is checked, else a wrong result."""
    other = 90 if card.sm // 10 == 8 else 86
    packages, _ = whole.pruned(other, tmp_path / "pruned")
    found = whole.results(tmp_path, packages)
    failed = [name for name, result in original["torch"].items() if found["torch"][name] != result]
    assert failed
