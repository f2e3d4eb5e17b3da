"""Work directories that cannot be used, and run directories of dead and live owners in them."""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cog_triton.errors import DiskFull, InvalidArgument
from cog_triton.serving.engine_preparation import prepare_engine
from cog_triton.settings import load_settings
from cog_triton.system.work_dir import (
    fresh_run_dir,
    require_usable,
)
from cog_triton.triton import installation


@pytest.mark.parametrize("below", ["", "more"])
def test_a_file_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="must be a directory that can be written"):
        require_usable(tmp_path / "file" / below)


def test_a_disk_that_is_full_when_the_stub_is_copied_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(installation.shutil, "copy", full)  # type: ignore[attr-defined]
    settings = load_settings(cog_triton_work_dir=tmp_path, cog_triton_engine="mock")
    with pytest.raises(DiskFull, match="COG_TRITON_WORK_DIR"):
        prepare_engine(settings, tmp_path)


SHM = Path("/dev/shm")
OWNER = """
import sys, time
from pathlib import Path
from cog_triton.system.work_dir import fresh_run_dir, new_shm_prefix
run_dir = fresh_run_dir(Path(sys.argv[1]))
prefix = new_shm_prefix(run_dir)
Path("/dev/shm", prefix + "key").write_bytes(b"x")
Path("/dev/shm", prefix + "mpi").mkdir()
print(run_dir, prefix, flush=True)
time.sleep(60)
"""


class Owner:
    def __init__(self, work_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(work_dir)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        run_dir, self.prefix = self.process.stdout.readline().split()
        self.run_dir = Path(run_dir)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def shm(self) -> list[str]:
        return sorted(p.name for p in SHM.iterdir() if p.name.startswith(self.prefix))


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.kill()
    for name in owner.shm:
        (SHM / name).rmdir() if name.endswith("mpi") else (SHM / name).unlink()


def test_the_shared_memory_of_a_killed_owner_is_removed(owner: Owner, tmp_path: Path) -> None:
    assert len(owner.shm) == 2
    owner.kill()
    fresh_run_dir(tmp_path)
    assert owner.shm == []
    assert not owner.run_dir.exists()


def test_what_a_live_owner_has_is_kept(owner: Owner, tmp_path: Path) -> None:
    fresh_run_dir(tmp_path)
    assert len(owner.shm) == 2
    assert owner.run_dir.is_dir()


def test_an_owner_of_another_pid_namespace_is_alive_by_its_lock(
    owner: Owner, tmp_path: Path
) -> None:
    foreign = owner.run_dir
    for name in (str(os.getpid()), "999999999"):
        foreign = foreign.rename(foreign.with_name(name))
        mine = fresh_run_dir(tmp_path)
        assert foreign.is_dir()
        assert mine != foreign
    assert len(owner.shm) == 2


def test_a_record_cannot_name_the_memory_of_others(tmp_path: Path) -> None:
    other = SHM / f"other-{secrets.token_hex(4)}"
    other.touch()
    try:
        dead = tmp_path / "run" / "999999999"
        dead.mkdir(parents=True)
        (dead / "shm-prefixes").write_text(f"{other.name}\ncog_triton_\n/\n\n")
        fresh_run_dir(tmp_path)
        assert other.exists()
    finally:
        other.unlink()
