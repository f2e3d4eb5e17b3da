"""A vLLM image's kit arrives part by part, and what is made of it is compared with its list."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from script_modules import ROOT, imported

MODULES = (
    "kit_parts", "receive", "installed_files", "parts", "assembled", "unpack", "driver_files"
)  # fmt: skip


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    with imported(("scripts", "tests/gpu/image"), MODULES) as modules:
        yield modules


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def kit_of(gpu: SimpleNamespace, directory: Path, content: bytes, size: int) -> Path:
    directory.mkdir()
    parts = gpu.kit_parts.Parts(directory, size)
    parts.write(content)
    parts.close()
    gpu.kit_parts.write_sums(directory, parts.paths)
    return directory


def carried(kit: Path, target: Path, *names: str) -> Path:
    """A directory with some of a kit's files, as one call carries it."""
    target.mkdir()
    for name in names:
        (target / name).write_bytes((kit / name).read_bytes())
    return target


def test_a_stream_waits_for_parts_that_are_carried_later(
    gpu: SimpleNamespace, tmp_path: Path
) -> None:
    content = bytes(range(256)) * 9
    packed = kit_of(gpu, tmp_path / "packed", content, 1000)
    kit = gpu.receive.Kit(tmp_path / "kit")
    assert kit.take(carried(packed, tmp_path / "1", "SHA256SUMS", "part-001")) == []
    assert kit.missing() == ["part-000", "part-002"]
    read = []
    stream = gpu.receive.Stream(kit, 60)
    reader = threading.Thread(target=lambda: read.append(stream.readall()))
    reader.start()
    assert kit.take(carried(packed, tmp_path / "2", "part-000")) == []
    assert kit.take(carried(packed, tmp_path / "3", "part-002")) == []
    reader.join(60)
    assert read == [content]
    assert kit.missing() == []


def test_a_damaged_part_is_named_and_not_kept(gpu: SimpleNamespace, tmp_path: Path) -> None:
    packed = kit_of(gpu, tmp_path / "packed", b"a" * 1500, 1000)
    (packed / "part-001").write_bytes(b"b" * 500)
    kit = gpu.receive.Kit(tmp_path / "kit")
    assert kit.take(packed) == ["part-001"]
    assert kit.missing() == ["part-001"]


def test_a_stream_gives_up_on_a_part_that_never_comes(gpu: SimpleNamespace, tmp_path: Path) -> None:
    packed = kit_of(gpu, tmp_path / "packed", b"a" * 1500, 1000)
    kit = gpu.receive.Kit(tmp_path / "kit")
    kit.take(carried(packed, tmp_path / "1", "SHA256SUMS", "part-000"))
    with pytest.raises(TimeoutError, match="part-001 has not come"):
        gpu.receive.Stream(kit, 0).readall()


def test_installed_files_are_found_by_their_content(gpu: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "lib.so.12").write_bytes(b"the library")
    (tmp_path / "lib.so").symlink_to("lib.so.12")
    (tmp_path / "other").write_bytes(b"other bytes")
    wanted = [(sha256(b"the library"), 11), (sha256(b"not there"), 9)]
    found = gpu.installed_files.find(wanted, [str(tmp_path)])
    assert found == {sha256(b"the library"): tmp_path / "lib.so.12"}


def row(path: str, content: bytes | None = None, link: str | None = None) -> dict[str, object]:
    digest = sha256(content) if content is not None else None
    kind = "file" if digest else "link" if link else "directory"
    made = {"layer": "python", "path": path, "type": kind, "mode": "0444"}
    return {**made, "sha256": digest, "link": link}


def test_files_are_compared_with_the_images_list(gpu: SimpleNamespace, tmp_path: Path) -> None:
    for name, content in (
        ("same", b"1"),
        ("changed.pyc", b"2"),
        ("more", b"3"),
        ("writable", b"4"),
    ):
        (tmp_path / "opt").mkdir(exist_ok=True)
        (tmp_path / "opt" / name).write_bytes(content)
        (tmp_path / "opt" / name).chmod(0o644 if name == "writable" else 0o444)
    (tmp_path / "opt/link").symlink_to("same")
    (tmp_path / "opt/other").symlink_to("more")
    rows = [row("/opt"), row("/opt/same", b"1"), row("/opt/changed.pyc", b"9")]
    rows += [row("/opt/gone", b"0"), row("/opt/link", link="same"), row("/opt/other", link="same")]
    found = gpu.assembled.compare(tmp_path, [*rows, row("/opt/writable", b"4")])
    assert found["total"] == {
        "equal": 2,
        "different": 2,
        "different, bytecode": 1,
        "missing": 1,
        "other mode": 1,
        "extra": 1,
    }
    assert found["names"] == {
        "different": ["opt/changed.pyc", "opt/other"],
        "missing": ["opt/gone"],
        "other mode": ["opt/writable"],
        "extra": ["opt/more"],
    }


def test_equal_files_of_image_and_peer_are_on_the_disk_once(
    gpu: SimpleNamespace, tmp_path: Path
) -> None:
    for kind, last in (("image", b"a"), ("peer", b"b")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "equal").write_bytes(b"x" * 1_000_000)
        (tmp_path / kind / "pruned").write_bytes(b"x" * 999_999 + last)
        (tmp_path / kind / "small").write_bytes(b"x")
    gpu.parts.share_equal(tmp_path / "image", tmp_path / "peer")
    links = {path.name: path.stat().st_nlink for path in (tmp_path / "peer").iterdir()}
    assert links == {"equal": 2, "pruned": 1, "small": 1}
    assert (tmp_path / "peer" / "pruned").read_bytes().endswith(b"b")


def test_layers_are_laid_over_each_other(gpu: SimpleNamespace, tmp_path: Path) -> None:
    for layer in ("base", "python"):
        (tmp_path / layer / "opt").mkdir(parents=True)
        (tmp_path / layer / "opt" / layer).write_text(layer)
    gpu.assembled.merge([tmp_path / "base", tmp_path / "python"], tmp_path / "root")
    assert sorted(path.name for path in (tmp_path / "root/opt").iterdir()) == ["base", "python"]


@pytest.mark.skipif(not hasattr(tarfile, "tar_filter"), reason="Python older than its filters")
def test_a_layer_is_unpacked_below_its_directory_alone(
    gpu: SimpleNamespace, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    with tarfile.open(tmp_path / "layer.tar", "w") as tar:
        directory = tarfile.TarInfo(f"{outside}/writable")
        directory.type, directory.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(directory)
        tar.addfile(tarfile.TarInfo(f"{outside}/file"))
    with tarfile.open(tmp_path / "layer.tar") as tar:
        tar.extractall(tmp_path / "made", filter=gpu.unpack.below)
    assert not outside.exists()
    made = tmp_path / "made" / outside.relative_to("/")
    assert sorted(path.name for path in made.iterdir()) == ["file", "writable"]
    assert (made / "writable").stat().st_mode & 0o7777 == 0o1777
    with pytest.raises(tarfile.FilterError):
        gpu.unpack.below(tarfile.TarInfo("a/../../file"), str(tmp_path / "made"))


def test_mount_points_are_made_in_the_root_alone(gpu: SimpleNamespace, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "usr").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").mkdir()
    assert gpu.driver_files.inside(root, "/etc/hosts") == root / "etc/hosts"
    with pytest.raises(ValueError, match="a link leads out"):
        gpu.driver_files.inside(root, "usr/nvidia-smi")


@pytest.mark.parametrize("script", ["verify-image", "setup-image", "pack-image"])
def test_help_works_without_set_up(tmp_path: Path, script: str) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    command = [sys.executable] if script == "pack-image" else []
    done = subprocess.run(
        [*command, str(ROOT / "scripts" / script), "--help"],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
