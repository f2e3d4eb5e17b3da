"""GPU memory by nvidia-smi, over a stand-in that prints what the driver's does."""

import os
import re
from pathlib import Path

import pytest

from cog_triton.system import gpus as module
from cog_triton.system.gpus import GPUMemoryUse, gpu_memory_use

MIB = 1 << 20
GPUS = "GPU-a, 0, 70000, 11000\nGPU-b, 1, 500, 80500\n"


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, apps: str, gpus: str = GPUS) -> None:
    program = directory / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncase $1 in\n--query-gpu=*) printf '%s' '{gpus}';;\n"
        f"--query-compute-apps=*) printf '%s' '{apps}';;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_it_counts_what_processes_hold_on_each_of_their_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "GPU-a, 41, 30000\nGPU-a, 42, 20000\nGPU-b, 7, 400\n")
    assert gpu_memory_use([41, 42]) == [GPUMemoryUse("0", 50000 * MIB, 11000 * MIB)]
    assert gpu_memory_use([99]) == []


def test_in_a_container_all_that_is_taken_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "", GPUS + "GPU-c, 2, [N/A], [N/A]\n")
    monkeypatch.setattr(module, "_DEVICE", re.compile(re.escape(str(tmp_path / "nvidia0"))))
    assert gpu_memory_use([os.getpid()]) == []
    with (tmp_path / "nvidia0").open("w"):
        assert gpu_memory_use([os.getpid()]) == [
            GPUMemoryUse("0", 70000 * MIB, 11000 * MIB),
            GPUMemoryUse("1", 500 * MIB, 80500 * MIB),
        ]


def test_without_nvidia_smi_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory_use([os.getpid()]) == []
