"""Phase ``machine``: what the others are run on, and with."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from arguments import REPOSITORY
from results import Phase


def note(phase: Phase, python: Path, *, rehearsal: bool) -> None:
    """Note GPU, processor and versions, ours and those of the `python` that has vLLM."""
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm"
    gpus = _said(["nvidia-smi", query, "--format=csv,noheader"]).splitlines()
    several = f"{len(gpus)} x " if len(gpus) > 1 else ""
    phase.put("gpu", several + "; ".join(dict.fromkeys(gpus)))
    if several:
        phase.put("topology", _said(["nvidia-smi", "topo", "-m"]))
    phase.put("cpu", f"{os.cpu_count()} cores, {_cpu_name()}")
    phase.put("kernel", platform.platform())
    names = ("cog", "coglet", "nvidia-pytriton", "tritonclient", "numpy", "tokenizers")
    versions = {name: importlib.metadata.version(name) for name in names}
    phase.put("ours", {"python": platform.python_version(), **versions})
    code = (
        "import importlib.metadata as m, json, platform\n"
        "names = ('vllm', 'torch', 'transformers', 'triton', 'numpy', 'xgrammar')\n"
        "found = {name: m.version(name) for name in names}\n"
        "print(json.dumps({'python': platform.python_version(), **found}))"
    )
    phase.put("sources", _source_digest())
    told = _said([str(python), "-c", code])
    if phase.check("vLLM's Python has it", told.startswith("{") or rehearsal, told):
        phase.put("vllm", {} if rehearsal else json.loads(told))
    print(json.dumps(phase.seen, indent=1), flush=True)


def _said(command: Sequence[str]) -> str:
    # What this Python's libraries are found by is not for programs of the machine.
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    except OSError as error:
        return str(error)
    return done.stdout.strip() or done.stderr.strip()[-400:]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")


def _source_digest() -> str:
    """SHA-256 of the code that is run, which may be a copy without a repository."""
    digest = hashlib.sha256()
    for directory in ("cog_triton", "cog_triton_prune", "benchmarks/gpu", "tests/gpu"):
        for path in sorted((REPOSITORY / directory).rglob("*.py")):
            digest.update(path.relative_to(REPOSITORY).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
