"""scripts/pack-gpu: what it unpacks is what it packed, on a machine that has some of it."""

from __future__ import annotations

import random
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "pack-gpu"
PACK = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=directory, capture_output=True, text=True
    )


@pytest.fixture
def packed(tmp_path: Path) -> SimpleNamespace:
    """A site-packages of which the other machine has one large file, and another's version."""
    for name in ("site/lib", "there", "installed"):
        (tmp_path / name).mkdir(parents=True)
    same, old, own = (random.Random(number).randbytes(1_200_000) for number in range(3))
    files = {
        "lib/same.so": same,
        "lib/newer.so": old[:600_000] + b"new" + old[600_000:],
        "lib/own.so": own,
        "lib/small.py": b"x = 1\n",
    }
    for name, data in files.items():
        (tmp_path / "site" / name).write_bytes(data)
    (tmp_path / "site" / "link.so").symlink_to("lib/own.so")
    with zipfile.ZipFile(tmp_path / "there" / "them-1-py3-none-any.whl", "w") as wheel:
        for name, data in (("lib/same.so", same), ("lib/newer.so", old), ("lib/small.py", b"y\n")):
            wheel.writestr(name, data)
            (tmp_path / "installed" / Path(name).name).write_bytes(data)
    PACK.pack_site(tmp_path / "site", tmp_path / "there", tmp_path / "kit")
    return SimpleNamespace(kit=tmp_path / "kit", files=files, installed=tmp_path / "installed")


needs_zstd = pytest.mark.skipif(not shutil.which("zstd"), reason="zstd is not installed")


@needs_zstd
def test_an_unpacked_environment_is_the_packed_one(packed: SimpleNamespace, tmp_path: Path) -> None:
    assert (packed.kit / "environment.tar.zst").stat().st_size < 1_300_000
    assert sum(path.stat().st_size for path in (packed.kit / "deltas").iterdir()) < 100_000
    site = tmp_path / "made"
    PACK.unpack_site(packed.kit, site, [str(packed.installed)])
    assert {name: (site / name).read_bytes() for name in packed.files} == packed.files
    assert (site / "link.so").read_bytes() == packed.files["lib/own.so"]


@needs_zstd
def test_what_the_machine_lacks_is_named(packed: SimpleNamespace, tmp_path: Path) -> None:
    (packed.installed / "same.so").unlink()
    with pytest.raises(SystemExit, match=r"lib/same\.so"):
        PACK.unpack_site(packed.kit, tmp_path / "made", [str(packed.installed)])


def test_parts_together_are_what_was_written(tmp_path: Path) -> None:
    parts = PACK.Parts(tmp_path, 1000)
    data = random.Random(0).randbytes(2500)
    for begin in range(0, 2500, 700):
        parts.write(data[begin : begin + 700])
    parts.close_part()
    assert [path.stat().st_size for path in parts.paths] == [1000, 1000, 500]
    assert b"".join(path.read_bytes() for path in parts.paths) == data


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name OUTPUT"),
        (["--unpack", "nowhere"], "no kit"),
        (["kit", "--python", "nowhere"], "no bin/python3.12"),
        (["full"], "other files"),
    ],
)
def test_wrong_arguments_change_nothing(tmp_path: Path, arguments: list[str], told: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.12").touch()
    done = run(tmp_path, "--python=.", *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert (tmp_path / "full" / "file").exists()


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "part-000").write_bytes(b"a")
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  part-000\n")
    done = run(tmp_path, "--unpack", ".", "made")
    assert "part-000" in done.stderr
    assert done.returncode == 1
    assert not (tmp_path / "made").exists()
