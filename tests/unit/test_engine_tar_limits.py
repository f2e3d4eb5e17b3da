"""Packing and unpacking: bounded memory, full disks, atomic writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from backports import zstd
from sample_engines import create

import cog_triton

NAMES = ["engine.tar", "engine.tar.gz", "engine.tar.zst"]
LIMITS = {"max_input_len": 1, "max_seq_len": 2, "max_batch_size": 1}
SCRIPT = """
import json, sys, time
from pathlib import Path
from cog_triton.artifact import engine_manifest, engine_tar
from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.errors import CogTritonError

def pack(directory, tar):
    held = engine_manifest.load(directory)
    members = engine_manifest.files_of(directory)
    del members[MANIFEST_NAME]
    engine_tar.pack(members, tar, lambda files: held.model_copy(update={"files": files}), progress)

def progress(_):
    if action == "stop":
        print("packing", flush=True)
        [time.sleep(0.1) for _ in range(600)]

action, directory, tar = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
try:
    engine_tar.unpack(tar, directory) if action == "unpack" else pack(directory, tar)
except CogTritonError as error:
    print(error)
# Not getrusage's, which begins with the peak of its parent.
(line,) = [l for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l]
print(json.dumps({"peak": int(line.split()[1]) << 10}))
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(cog_triton.__file__).parents[1])}


def engine(path: Path, megabytes: int) -> Path:
    """Half of it compresses, half does not."""
    path.mkdir()
    with (path / "rank0.engine").open("wb") as file:
        for _ in range(megabytes // 2):
            file.write(os.urandom(1 << 20))
            file.write(b"weights " * (1 << 17))
    create(path, engine="tensorrt_llm", model_id="m", versions={}, **LIMITS)
    return path


def run(action: str, directory: Path, tar: Path, *before: str) -> list[str]:
    """The lines that `action` printed, the last being its peak of memory."""
    done = subprocess.run(
        [*before, sys.executable, "-c", SCRIPT, action, str(directory), str(tar)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_memory_stays_under_200_mb(name: str, tmp_path: Path) -> None:
    tar = tmp_path / name
    for action, directory in (("pack", engine(tmp_path / "e", 220)), ("unpack", tmp_path / "out")):
        peak = json.loads(run(action, directory, tar)[-1])["peak"]
        assert 10_000_000 < peak < 200_000_000
    assert (tmp_path / "out" / "rank0.engine").stat().st_size == 220 << 20


def test_memory_stays_under_200_mb_for_the_widest_zstd(tmp_path: Path) -> None:
    run("pack", engine(tmp_path / "e", 220), tmp_path / "engine.tar")
    options = {
        zstd.CompressionParameter.compression_level: 1,
        zstd.CompressionParameter.window_log: 27,
    }
    wide = zstd.ZstdFile(tmp_path / "w.tar.zst", "w", options=options)
    with (tmp_path / "engine.tar").open("rb") as plain, wide:
        shutil.copyfileobj(plain, wide, 1 << 20)
    peak = json.loads(run("unpack", tmp_path / "out", tmp_path / "w.tar.zst")[-1])["peak"]
    assert 128 << 20 < peak < 200_000_000


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_pack_leaves_the_existing_tar(
    number: signal.Signals, name: str, tmp_path: Path
) -> None:
    made = engine(tmp_path / "e", 4)
    target = tmp_path / "out" / name
    target.parent.mkdir()
    for before in (None, b"an earlier one"):
        if before:
            target.write_bytes(before)
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT, "stop", str(made), str(target)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"packing\n"
            process.send_signal(number)
        assert (target.read_bytes() if target.exists() else None) == before
        if number == signal.SIGKILL:  # the next one clears away what it left
            assert len(list(target.parent.glob(".*"))) == 1
            run("pack", made, target.with_name("other.tar"))
            assert len(list(target.parent.glob(".*"))) == 1
            run("pack", made, target)
            target.unlink()
        assert list(target.parent.glob(".*")) == []


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Where a disk of 8 MB is for a command behind these words; it goes with that command."""
    place = tmp_path_factory.mktemp("small")
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    words += [f'mount -t tmpfs -o size=8m none {place} && "$@"; s=$?; ls -A {place}; exit $s', "-"]
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount")
    return place, words


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("engine.tar", r"needs 21.0 MB, 8.4 MB free in {place}"),
        ("engine.tar.gz", r"needs up to 21.0 MB, 8.4 MB free in {place}: No space left on device"),
        ("engine.tar.zst", r"needs up to 21.0 MB, 8.4 MB free in {place}: No space left on device"),
    ],
)
def test_packing_on_a_full_disk_is_disk_full(
    name: str, said: str, small_disk: tuple[Path, list[str]], tmp_path: Path
) -> None:
    place, words = small_disk
    lines = run("pack", engine(tmp_path / "e", 20), place / name, *words)
    assert lines[0] == f"E2302 DiskFull: {place / name}: " + said.format(place=place)
    assert lines[2:] == []  # nothing is left there


def test_packing_on_a_slightly_too_small_disk_is_disk_full(
    small_disk: tuple[Path, list[str]], tmp_path: Path
) -> None:
    place, words = small_disk
    lines = run("pack", engine(tmp_path / "e", 8), place / "e.tar", *words)
    assert lines[0].endswith(f"needs 8.4 MB, 8.4 MB free in {place}: No space left on device")
    assert lines[2:] == []


@pytest.mark.parametrize("name", NAMES)
def test_unpacking_on_a_full_disk_is_disk_full(
    name: str, small_disk: tuple[Path, list[str]], tmp_path: Path
) -> None:
    place, words = small_disk
    tar = tmp_path / name
    run("pack", engine(tmp_path / "e", 20), tar)
    lines = run("unpack", place / "out", tar, *words)
    size = f"{tar.stat().st_size / 1e6:.1f} MB"
    wanted = {
        "engine.tar": f"needs {size}, 8.4 MB free in {place}",
        "engine.tar.gz": f"needs more than its gzip of {size}, 8.4 MB free in {place}: No space",
        "engine.tar.zst": f"needs more than its zstd of {size}, 8.4 MB free in {place}: No space",
    }
    assert lines[0].startswith(f"E2302 DiskFull: {tar}: {wanted[name]}")
    assert lines[2:] == []
