"""Host memory: what is left, files that are read ahead into it, and starts that lack it."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_server import wait_until

from cog_triton.errors import InvalidArgument
from cog_triton.system import page_cache
from cog_triton.system.host_memory import HostMemory, OomKills, host_memory
from cog_triton.triton.server import hint, shell_safe

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


def test_the_tightest_group_limits_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "groups").write_text("0::/pod/job\n")
    group(tmp_path / "fs/pod", "3000000", 1200, 200)
    group(tmp_path / "fs/pod/job", "4000000", 1200, 200)
    found = host_memory(tmp_path / "meminfo", tmp_path / "groups", tmp_path / "fs")
    assert found.free == 3000000 - 1000
    assert found.limits.startswith(f"{tmp_path}/fs/pod/memory.max of ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "Unable to initialize shared memory key 'cog_triton_1_a_0_b' to requested size (1048576"
            " bytes). Error: No space left on device",
            "--shm-size",
        ),
        ("what():  Failed to create temporary directory for Python environments.", "/tmp cannot"),
        ("UnicodeEncodeError: 'ascii' codec can't encode characters", "COG_TRITON_WORK_DIR"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "memory is short"),
    ],
)
def test_known_causes_say_what_to_do(line: str, said: str) -> None:
    assert said in hint(f"I1 server.cc\n{line}\nE1")


def test_other_logs_have_no_hint() -> None:
    assert hint("error: creating server: Internal - failed to load all models") == ""


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/a/b", "a/b/memory.events"),
        ("4:cpu,memory:/a", "memory/a/memory.oom_control"),
        ("0::/not/mounted", "memory.events"),
        ("4:memory:/x", "memory/memory.oom_control"),
    ],
)
def test_a_kill_for_want_of_memory_is_told(group: str, file: str, tmp_path: Path) -> None:
    groups, counts = tmp_path / "cgroup", tmp_path / "fs" / file
    groups.write_text(f"1:name=systemd:/\n{group}\n")
    counts.parent.mkdir(parents=True)
    counts.write_text("oom 5\noom_kill 2\n")
    kills = OomKills(groups, tmp_path / "fs")
    assert kills.hint() == ""
    counts.write_text("oom 5\noom_kill 3\n")
    assert "killed a process for want of memory" in kills.hint()


def test_no_control_groups_tell_nothing(tmp_path: Path) -> None:
    assert OomKills(tmp_path / "none", tmp_path).hint() == ""


@pytest.mark.parametrize("name", ["plain", "größe", "a.b+c,d:e@f%g=h^i_j-k"])
def test_one_word_of_a_shell_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    assert shell_safe(tmp_path / name, "cog_triton_x_") == tmp_path / name


@pytest.mark.parametrize("character", " \n'$*")
def test_other_names_get_a_link(tmp_path: Path, character: str) -> None:
    path = tmp_path / f"a{character}b"
    path.mkdir()
    link = shell_safe(path, f"cog_triton_{os.getpid()}_")
    try:
        assert link.parent == Path("/dev/shm")
        words = f"printf '%s\\n' {link}/end"  # as Triton starts a stub
        said = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True)
        assert said.stdout == f"{link}/end\n"
        assert link.resolve() == path.resolve()
    finally:
        link.unlink()
    with pytest.raises(InvalidArgument, match="MPI_HOSTS='a,b'"):
        shell_safe(path, "cog_triton_x_", "a,b")


SIZE = 2_000_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(bytes(SIZE))
    return tmp_path / "weights"


def left(*sizes: int) -> Callable[[], HostMemory]:
    """What is told of memory, again and again."""
    told = iter(sizes)
    return lambda: HostMemory(next(told), "")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_not_cached_is_read(
    cached: bool, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(page_cache, "_is_cached", lambda *_: cached)
    with page_cache.reading_ahead([file, file]):
        wait_until(lambda: "read ahead" in caplog.text)
    assert f"read ahead: {0 if cached else 4} MB of weights" in caplog.text


def test_a_page_that_was_just_read_is_cached(file: Path) -> None:
    with file.open("rb") as opened:
        os.pread(opened.fileno(), SIZE, 0)
        try:
            os.preadv(opened.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError:
            pytest.skip("this file system cannot be asked")
        assert page_cache._is_cached(opened.fileno(), 0)
        assert not page_cache._is_cached(opened.fileno(), SIZE)


def test_it_stops_where_memory_gets_short(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(page_cache, "_is_cached", lambda *_: False)
    monkeypatch.setattr(page_cache, "host_memory", left(1 << 40, page_cache.ROOM - 1))
    with page_cache.reading_ahead([file]):
        wait_until(lambda: "read ahead: 0 MB" in caplog.text)
    assert threads() == []
