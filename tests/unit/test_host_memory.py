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


def test_the_machine_limits_where_no_group_does(machine: Path) -> None:
    write(machine / "fs/job/memory.max", "max")
    free, limits = measured(machine, "0::/job")
    assert (free, limits) == ((64 << 30) / GB, "MemAvailable of the machine")
    assert host_memory(machine / "meminfo", machine / "none", machine / "fs").free == 64 << 30


def test_the_tightest_group_limits(machine: Path) -> None:
    for name, most in (("pod", 30 * GB), ("pod/job", 40 * GB)):
        write(machine / f"fs/{name}/memory.max", most)
        write(machine / f"fs/{name}/memory.current", 12 * GB)
        write(machine / f"fs/{name}/memory.stat", f"anon 1\ninactive_file {2 * GB}")
    free, limits = measured(machine, "0::/pod/job")
    assert free == 20
    assert limits == f"{machine}/fs/pod/memory.max of 30.0 GB"


def test_groups_of_version_1_limit(machine: Path) -> None:
    group = machine / "fs/memory/box"
    write(group / "memory.limit_in_bytes", 8 * GB)
    write(group / "memory.usage_in_bytes", 9 * GB)
    write(group / "memory.stat", "cache 1")
    write(machine / "fs/memory/memory.limit_in_bytes", 9223372036854771712)
    free, limits = measured(machine, "5:cpu,cpuacct:/box\n4:memory:/box")
    assert free == 0, "a group over its limit has none left"
    assert "memory.limit_in_bytes of 8.0 GB" in limits
