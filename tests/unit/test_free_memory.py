"""Free memory: the least of the machine's and of each control group's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cog_triton.artifact.engine_size import engine_bytes
from cog_triton.system.host_memory import host_memory, memory_of

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


def test_of_processes_the_dead_count_nothing() -> None:
    own = memory_of([os.getpid()])
    assert own > 1 << 20
    assert memory_of([]) == memory_of([2**22 + 1]) == 0


def test_size_of_an_engine(tmp_path: Path) -> None:
    (tmp_path / "engine" / "1").mkdir(parents=True)
    (tmp_path / "engine" / "1" / "weights").write_bytes(b"12345")
    (tmp_path / "a b.tar").write_bytes(b"123")
    assert engine_bytes(str(tmp_path / "engine")) == 5
    assert engine_bytes(str(tmp_path / "a b.tar")) == 3
    assert engine_bytes(f"file://{tmp_path}/a%20b.tar") == 3
    for unknown in ("", "https://example.com/engine.tar", str(tmp_path / "none")):
        assert engine_bytes(unknown) is None
