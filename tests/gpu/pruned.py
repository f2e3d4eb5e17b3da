"""Pruned copies of PyTorch and vLLM, with device code for one GPU alone, beside the originals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from endpoints import Endpoint
from results import Phase
from servers import Server, running, vllm_serve

if TYPE_CHECKING:
    from verify import Driver

_FIND = """
import importlib.util, json, torch
where = {name: importlib.util.find_spec(name).origin for name in ("torch", "vllm")}
major, minor = torch.cuda.get_device_capability()
print(json.dumps({**where, "sm": 10 * major + minor}))
"""


class Pruned:
    """The phase ``prune`` of a `Driver`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {"prune": self.compare}

    def compare(self, phase: Phase) -> None:
        """Compare ``vllm serve`` over pruned libraries with the originals: tokens, speed, start."""
        driver = self._driver
        output = driver.root / "pruned"
        shutil.rmtree(output, ignore_errors=True)
        environment, report = prune(driver.python, output)
        phase.put("files", sizes(report))
        freed = sum(row["freed"] for row in phase.seen["files"])
        print(f"  sm_{report['sm']}: {freed / 1e6:.0f} MB of device code freed", flush=True)
        paths = imported(driver.python, environment)
        right = all(paths[name].startswith(str(output)) for name in ("torch", "vllm"))
        phase.check("the copies are imported", right, paths)
        environment = {**driver.environment, **environment}
        whole = self._serve("prune-whole", driver.large, driver.environment)
        less = self._serve("prune-pruned", driver.large, environment)
        again = self._serve("prune-pruned-again", driver.large, environment)
        with running(less):  # compiles, if what was compiled before does not suit it
            phase.put("pruned: first start", {"seconds": less.start_s, **less.start_times()})
        with running(whole):
            phase.put("whole: start", {"seconds": whole.start_s, **whole.start_times()})
            with running(again):
                phase.put("pruned: start", {"seconds": again.start_s, **again.start_times()})
                endpoints: list[tuple[Endpoint, Server]] = [
                    (Endpoint("whole", whole.openai), whole),
                    (Endpoint("pruned", again.openai), again),
                ]
                told = [endpoint for endpoint, _ in endpoints]
                driver.same_texts(phase, driver.large, told, count=16, max_tokens=256)
                driver.rounds(phase, endpoints, driver.large)
        self._same_with_real_weights(phase, environment)

    def _same_with_real_weights(self, phase: Phase, environment: dict[str, str]) -> None:
        """Compare answers of real weights; made-up ones repeat a few tokens, right or wrong."""
        driver = self._driver
        whole = self._serve("prune-small", driver.small, driver.environment)
        less = self._serve("prune-small-pruned", driver.small, environment)
        with running(whole, less):
            told = [
                Endpoint("SmolLM2 whole", whole.openai),
                Endpoint("SmolLM2 pruned", less.openai),
            ]
            driver.same_texts(phase, driver.small, told, count=16, max_tokens=256)

    def _serve(self, name: str, model: Path, environment: Mapping[str, str]) -> Server:
        return vllm_serve(name, model, self._driver.logs, self._driver.python, **environment)


def prune(python: Path, output: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Copy and prune what `python` imports as torch and vllm, for this machine's GPU.

    Returns the environment in which it imports the copies, and `cog-triton prune`'s report. What
    torch looks for beside itself is linked.
    """
    found = json.loads(_said([python, "-c", _FIND]).splitlines()[-1])
    packages = [Path(found[name]).parent for name in ("torch", "vllm")]
    command = ["-m", "cog_triton", "prune", f"--sm={found['sm']}", "--output", str(output)]
    report = _said([sys.executable, *command, "--json", *map(str, packages)])
    for package in packages:
        for beside in package.parent.iterdir():
            link = output / beside.name
            if beside.name.endswith(".libs") or beside.name == "nvidia":
                link.exists() or link.symlink_to(beside)
    path = os.pathsep.join(filter(None, [str(output), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}, {"sm": found["sm"], **json.loads(report)}


def _said(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def imported(python: Path, environment: dict[str, str]) -> dict[str, str]:
    """Paths of the packages torch and vllm in `environment`."""
    told = _said([python, "-c", _FIND], {**os.environ, **environment})
    paths: dict[str, str] = json.loads(told.splitlines()[-1])
    return paths


def sizes(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Sizes in bytes of each pruned file: whole, and freed."""
    return [
        {"file": Path(row["path"]).name, "size": row["size"], "freed": row["freed"]}
        for row in report["files"]
        if row["action"] == "pruned"
    ]
