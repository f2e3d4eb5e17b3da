"""Single operations over an image's libraries and over the whole ones: the same bits."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from image_servers import Container
from results import Phase
from verify_prune import LIBRARIES

_SITE = "/opt/cog-triton/lib/python3.12/site-packages"
_PROGRAM = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 420


def compare(image: Container, peer: Container, logs: Path, phase: Phase) -> None:
    """Run all operations over the whole libraries, twice, and over the image's, all at once.

    What differs between two runs over the same libraries proves nothing, and is told.
    """
    started = {
        name: _start(container, logs / f"operations-{name}")
        for name, container in (("whole", peer), ("again", peer), ("pruned", image))
    }
    runs = {name: _finish(process) for name, process in started.items()}
    for group in LIBRARIES:
        whole, again, pruned = (runs[name]["results"][group] for name in started)
        usable = {
            name for name, digest in whole.items()
            if digest == again[name] and not digest.startswith("error")
        }  # fmt: skip
        different = sorted(name for name in usable if pruned[name] != whole[name])
        errors = {name: told for name, told in whole.items() if told.startswith("error")}
        row = {"operations": len(whole), "usable": len(usable), "different": different}
        phase.put(group, {**row, "errors": errors})
        name = f"{LIBRARIES[group]}: the same bits in {len(usable)} of {len(whole)} operations"
        phase.check(name, bool(usable) and not different, different)


def _start(container: Container, work: Path) -> subprocess.Popen[str]:
    words = ["/opt/cog-triton/bin/python", "/verify/workload.py", ",".join(LIBRARIES)]
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONDONTWRITEBYTECODE": "1"}
    command = container.command([*words, f"{_SITE}/vllm"], work, environment)
    command.insert(command.index("--"), f"--read={_PROGRAM}:/verify")
    with (work / "errors.log").open("w") as errors:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError(f"operations ended with exit code {process.returncode}: {out[-400:]}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found
