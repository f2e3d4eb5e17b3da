"""Process tree of a server by role, and the CPU time of each process (Linux)."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from cog_triton.system import reaper
from cog_triton.system.process_state import stat_fields

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_ROLES = {
    rb"image/container\.py\0": "container",
    rb"/vllm-rs\0": "vLLM Rust front end",
    rb"vllm\.entrypoints\.cli\.main\0serve": "vllm serve",
    rb"EngineCore|vllm\.core_process": "vLLM EngineCore",
    rb"VLLM::Worker": "vLLM worker",
    rb"DPCoordinator": "vLLM DP coordinator",
    rb"engine_process": "our host of AsyncLLM",
    rb"VLLM::APIServer|api_server": "vLLM API server",
    rb"triton_python_backend_stub": "Triton stub",
    rb"bin/tritonserver": "tritonserver",
    rb"cog_triton\.door": "front door",
    rb"template_child": "chat templates",
    rb"front\.server\0": "server",
    rb"cog\.server\.http\0": "Cog",
    rb"_run_worker": "Cog worker",
    rb"-m\0cog_triton[\0.]serve": "cog-triton serve",
}


def process_tree(root: int) -> dict[int, str]:
    """Role of `root` and each of its descendants, by process id."""
    return {pid: _role(pid) for pid in (root, *reaper.descendants(root))}


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """CPU seconds used so far by each process that is still alive."""
    times = {}
    for pid in pids:
        if fields := stat_fields(Path(f"/proc/{pid}/stat")):
            times[pid] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return times


def cores(
    roles: Mapping[int, str],
    before: Mapping[int, float],
    after: Mapping[int, float],
    seconds: float,
) -> dict[str, float]:
    """CPU cores used by each role between two samples taken `seconds` apart."""
    used: defaultdict[str, float] = defaultdict(float)
    for pid, time in after.items():
        used[roles[pid]] += (time - before.get(pid, 0.0)) / seconds
    return {role: round(share, 3) for role, share in used.items() if share >= 0.001}


def _role(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "gone"
    role = next((role for mark, role in _ROLES.items() if re.search(mark, line)), "other")
    model = re.search(rb"models?/(\w+)/1/model\.py|/(\w+)/1/model\.py", line)
    if role == "Triton stub" and model:
        role += f" {(model[1] or model[2]).decode()}"
    return role
