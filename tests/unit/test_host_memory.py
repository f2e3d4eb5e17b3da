"""Host memory that is left: of the machine, and of the control groups above us."""

from __future__ import annotations

from pathlib import Path

import pytest

from cog_triton.system.host_memory import host_memory

GB = 10**9


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 64 GiB left, in whose tree control groups can be written."""
    write(tmp_path / "meminfo", f"MemTotal: 1 kB\nMemAvailable:   {64 << 20} kB")
    return tmp_path


def measured(machine: Path, groups: str) -> tuple[float, str]:
    write(machine / "cgroup", groups)
    found = host_memory(machine / "meminfo", machine / "cgroup", machine / "fs")
    return found.free / GB, found.limits


def test_the_tightest_group_limits(machine: Path) -> None:
    for name, most in (("pod", 30 * GB), ("pod/job", 40 * GB)):
        write(machine / f"fs/{name}/memory.max", most)
        write(machine / f"fs/{name}/memory.current", 12 * GB)
        write(machine / f"fs/{name}/memory.stat", f"anon 1\ninactive_file {2 * GB}")
    free, limits = measured(machine, "0::/pod/job")
    assert free == 20
    assert limits == f"{machine}/fs/pod/memory.max of 30.0 GB"


MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"


def group(directory: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    old = version == 1
    (directory / ("memory.limit_in_bytes" if old else "memory.max")).write_text(f"{limit}\n")
    (directory / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used}\n")
    name = "total_inactive_file" if old else "inactive_file"
    (directory / "memory.stat").write_text(f"anon 1\n{name} {cache}\n")


@pytest.mark.parametrize(
    ("line", "directory", "version"),
    [
        ("0::/a/b", "a/b", 2),
        ("0::/a/b", "a", 2),
        ("0::/", ".", 2),
        ("0::/elsewhere", ".", 2),
        ("4:cpu,memory:/a", "memory/a", 1),
        ("4:memory:/elsewhere", "memory", 1),
    ],
)
def test_a_control_group_limits_it(tmp_path: Path, line: str, directory: str, version: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "groups").write_text(f"{line}\n")
    arguments = (tmp_path / "meminfo", tmp_path / "groups", tmp_path / "fs")
    assert host_memory(*arguments).free == 8000 * 1024
    group(tmp_path / "fs" / directory, "max", 900, 300, version)
    assert host_memory(*arguments).free == 8000 * 1024
    group(tmp_path / "fs" / directory, "1000", 900, 300, version)
    assert host_memory(*arguments).free == 1000 - 900 + 300
    group(tmp_path / "fs" / directory, "1000", 1900, 300, version)
    assert host_memory(*arguments).free == 0
