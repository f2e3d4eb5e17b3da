"""engine.tar and its manifest: reproducible, verified, in bounded memory, on full disks."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from sample_engines import create, pack

import cog_triton
from cog_triton.artifact import engine_manifest, engine_tar
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, FileEntry, Manifest, load, verify
from cog_triton.artifact.engine_tar import unpack
from cog_triton.errors import BuildStepFailed, EngineCorrupt, InvalidArgument


def engine(directory: Path) -> Manifest:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "sub").mkdir(exist_ok=True)
    (directory / "sub" / "weights.bin").write_bytes(b"weights")
    return create(
        directory,
        engine="openvino",
        model_id="pypi:x==1",
        config_sha256="0" * 64,
        versions={"cog_triton": "2", "openvino": "1"},
        max_input_len=7,
        max_seq_len=8,
        max_batch_size=2,
    )


def test_manifest_has_the_documented_shape(tmp_path: Path) -> None:
    written = engine(tmp_path)
    value = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert list(value) == [
        "schema",
        "engine",
        "model_id",
        "revision",
        "config_sha256",
        "sm",
        "gpu_name",
        "versions",
        "world_size",
        "max_input_len",
        "max_seq_len",
        "max_batch_size",
        "files",
    ]
    assert value["schema"] == 1
    digest = hashlib.sha256(b"weights").hexdigest()
    assert value["files"]["sub/weights.bin"] == {"size": 7, "sha256": digest}
    assert list(value["files"]) == ["config.json", "sub/weights.bin"]
    assert load(tmp_path) == written
    verify(tmp_path, written)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            '"schema": 1',
            '"schema": 4',
            "schema: 4: must be 1, 2 or 3; a later version",
        ),
        ('"files"', '"runtime": {"a": 1}, "files"', "runtime needs schema 2"),
        ('"schema": 1', '"schema": 2, "runtime": {"a": 1}', "runtime is for engines of tensorrt"),
        ('"max_seq_len": 8', '"max_seq_len": "8"', "max_seq_len: '8'"),
        ('"world_size": 1', '"world_size": 0', "world_size: 0"),
        ('"size": 7', '"size": -7', "files.sub/weights.bin.size: -7"),
        ('"engine": "openvino"', '"surprise": 1', "engine"),
        ("{", "", "the document"),
    ],
)
def test_a_broken_manifest_is_refused_by_key(old: str, new: str, says: str, tmp_path: Path) -> None:
    engine(tmp_path)
    path = tmp_path / MANIFEST_NAME
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(EngineCorrupt) as caught:
        load(tmp_path)
    assert says in str(caught.value)


NAMES = ["engine.tar", "engine.tar.gz", "engine.tgz", "engine.tar.zst"]


def packed(tmp_path: Path, name: str = "engine.tar") -> Path:
    engine(tmp_path / "engine")
    return pack(tmp_path / "engine", tmp_path / name)


def described(files: dict[str, FileEntry]) -> Manifest:
    limits = {"max_input_len": 1, "max_seq_len": 2, "max_batch_size": 1}
    return Manifest(engine="openvino", model_id="m", versions={}, files=files, **limits)


def make_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("name", NAMES)
def test_packing_and_unpacking_preserve_files(name: str, tmp_path: Path) -> None:
    tar = packed(tmp_path, name)
    assert unpack(tar, tmp_path / "out") == engine_manifest.load(tmp_path / "engine")
    for member, path in engine_manifest.files_of(tmp_path / "engine").items():
        assert (tmp_path / "out" / member).read_bytes() == path.read_bytes()
    assert leftovers(tmp_path) == []


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is one of those that threads copy."""
    monkeypatch.setattr(engine_tar, "_APART", 1)


@pytest.mark.usefixtures("side_by_side")
def test_files_that_are_copied_side_by_side_are_the_same(tmp_path: Path) -> None:
    blocks = {f"part-{n}": os.urandom(3 * engine_tar.PIECE + n) for n in range(7)}
    tar = engine_tar.pack(blocks, tmp_path / "engine.tar", described)
    assert unpack(tar, tmp_path / "out") is not None
    assert all((tmp_path / "out" / n).read_bytes() == block for n, block in blocks.items())


@pytest.mark.usefixtures("side_by_side")
def test_damage_is_found_in_files_that_are_copied_side_by_side(tmp_path: Path) -> None:
    blocks = {f"part-{n}": os.urandom(engine_tar.PIECE) for n in range(5)}
    tar = engine_tar.pack(blocks, tmp_path / "engine.tar", described)
    whole = tar.read_bytes()
    at = whole.index(blocks["part-3"])
    tar.write_bytes(whole[:at] + b"damaged" + whole[at + 7 :])
    with pytest.raises(EngineCorrupt, match="part-3"):
        unpack(tar, tmp_path / "out")
    tar.write_bytes(whole[: at + 1000])
    with pytest.raises(EngineCorrupt, match=r"not a whole, readable tar|ends after 1000"):
        unpack(tar, tmp_path / "out")
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", NAMES)
def test_equal_files_give_equal_bytes(name: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = packed(tmp_path / "one", name)
    os.utime(tmp_path / "one/engine/config.json", (1, 1))
    (tmp_path / "one/engine/config.json").chmod(0o600)
    (tmp_path / "one" / "engine" / "sub" / "empty").mkdir()
    two = pack(tmp_path / "one" / "engine", tmp_path / f"another.{name}")
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_mode & 0o777 == 0o644


def test_members_are_sorted_and_bare_and_the_manifest_is_last(tmp_path: Path) -> None:
    with tarfile.open(packed(tmp_path)) as tar:
        infos = tar.getmembers()
    names = [info.name for info in infos]
    assert names == [*sorted(names[:-1]), MANIFEST_NAME]
    assert {(i.mtime, i.uid, i.gid, i.uname, i.gname, i.mode) for i in infos} == {
        (0, 0, 0, "", "", 0o644)
    }


def test_texts_and_files_of_any_place_are_members(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("file")
    done: list[int] = []
    members = {"b/from file": tmp_path / "there", "a": b"text", "é" * 120: b"", "c": b"x" * 3000}
    tar = engine_tar.pack(members, tmp_path / "x.tar", described, done.append)
    manifest = unpack(tar, tmp_path / "out")
    assert manifest is not None
    assert list(manifest.files) == sorted(members)
    assert manifest.files["a"].size == 4
    assert (tmp_path / "out" / "b" / "from file").read_text() == "file"
    assert sum(done) == 3008


@pytest.mark.parametrize("name", ["engine", "engine.zip", "engine.tar.xz", "tar", "engine.TAR"])
def test_an_unknown_suffix_is_refused_before_anything_is_read(name: str, tmp_path: Path) -> None:
    known = r"\.tar, \.tar\.gz, \.tgz, \.tar\.zst"
    with pytest.raises(InvalidArgument, match=rf"{name}': its name must end in one of {known}$"):
        engine_tar.pack({"gone": tmp_path / "gone"}, tmp_path / name, described)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changes_while_it_is_packed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for size, said in ((1 << 20, "f became shorter"), (5 << 20, "f grew")):
        path.write_bytes(bytes(3 << 20))
        with pytest.raises(BuildStepFailed, match=said):
            engine_tar.pack(
                {"f": path}, tmp_path / "x.tar", described, lambda _, to=size: os.truncate(path, to)
            )
        assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_an_existing_directory_is_replaced_atomically(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale").write_text("")
    unpack(packed(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out" / "stale").exists()
    assert leftovers(tmp_path) == []


ATTACKS = {
    "absolute": [(member("/etc/x"), b"")],
    "parent": [(member("../x"), b"")],
    "inner parent": [(member("a/../../x"), b"")],
    "link out": [(member("a", tarfile.SYMTYPE, "/etc"), b"")],
    "link up": [(member("d/a", tarfile.SYMTYPE, "../x"), b"")],
    "behind link": [(member("a", tarfile.SYMTYPE, "b"), b""), (member("a/x"), b"")],
    "hard link": [(member("b"), b""), (member("a", tarfile.LNKTYPE, "b"), b"")],
    "device": [(member("a", tarfile.CHRTYPE), b"")],
    "block device": [(member("a", tarfile.BLKTYPE), b"")],
    "pipe": [(member("a", tarfile.FIFOTYPE), b"")],
    "twice": [(member("a"), b"1"), (member("./a"), b"2")],
    "file and directory": [(member("a"), b"1"), (member("a/b"), b"2")],
    "directory in place of a file": [(member("a"), b"1"), (member("a", tarfile.DIRTYPE), b"")],
    "over a link": [(member("a", tarfile.SYMTYPE, "b"), b""), (member("a"), b"2")],
    "empty": [],
}


@pytest.mark.parametrize("name", list(ATTACKS))
def test_unsafe_tars_are_refused_and_leave_nothing(name: str, tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "bad.tar", *ATTACKS[name])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "before").write_text("kept")
    with pytest.raises(EngineCorrupt):
        unpack(tar, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.tar", "out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["before"]


def test_links_that_point_down_are_kept(tmp_path: Path) -> None:
    tar = make_tar(
        tmp_path / "x.tar", (member("d/f"), b"1"), (member("a", tarfile.SYMTYPE, "d/f"), b"")
    )
    unpack(tar, tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "1"


@given(part=st.floats(0, 0.999))
def test_a_truncated_tar_is_refused_wherever_it_ends(
    tmp_path_factory: pytest.TempPathFactory, part: float
) -> None:
    tmp_path = tmp_path_factory.mktemp("cut")
    content = packed(tmp_path).read_bytes()
    end = len(content.rstrip(b"\0"))
    (tmp_path / "cut.tar").write_bytes(content[: int(end * part)])
    with pytest.raises(EngineCorrupt, match=r"cut\.tar|manifest|member"):
        unpack(tmp_path / "cut.tar", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_tar_that_ends_between_members_is_refused_without_a_manifest(
    count: int, tmp_path: Path
) -> None:
    tar = make_tar(tmp_path / "x.tar", (member("a"), b"1"), (member("b"), b"2"))
    (tmp_path / "y.tar").write_bytes(tar.read_bytes()[: 1024 * count])
    with pytest.raises(EngineCorrupt, match=r"y\.tar"):
        unpack(tmp_path / "y.tar", tmp_path / "out")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a tar at all" * 100,
        b"\x1f\x8bnot gzip",
        b"\x28\xb5\x2f\xfdnot zstd",
        b"\x28\xb5\x2f\xfd",
        b"\x50\x2a\x4d\x18",
    ],
)
def test_a_file_that_is_no_tar_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(EngineCorrupt, match=r"x\.tar"):
        unpack(tmp_path / "x.tar", tmp_path / "out")


def test_a_flipped_byte_is_found_while_unpacking(tmp_path: Path) -> None:
    tar = packed(tmp_path)
    content = tar.read_bytes()
    tar.write_bytes(content.replace(b"weights\0", b"weightz\0"))
    with pytest.raises(EngineCorrupt, match=r"sub/weights.bin has sha256"):
        unpack(tar, tmp_path / "out")


def test_a_member_that_the_manifest_does_not_name_is_refused(tmp_path: Path) -> None:
    tar = packed(tmp_path)
    with tarfile.open(tar, "a") as file:
        file.addfile(member("extra"))
    with pytest.raises(EngineCorrupt, match=r"extra is in the tar but not in its manifest"):
        unpack(tar, tmp_path / "out")


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_pack_leaves_the_old_tar(name: str, tmp_path: Path) -> None:
    tar = packed(tmp_path, name)
    before = tar.read_bytes()
    with pytest.raises(FileNotFoundError):
        engine_tar.pack({"zzz": tmp_path / "vanished"}, tar, described)
    with pytest.raises(ZeroDivisionError):
        engine_tar.pack({"a": b""}, tar, lambda _: 1 // 0)  # type: ignore[arg-type]
    assert tar.read_bytes() == before
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize(
    ("size", "says"),
    [
        (1 << 40, "a header of 1099511627776 bytes, over 65536"),
        (-(1 << 40), r"(a header of -1099511627776 bytes|invalid offset)"),  # newer tarfiles' words
    ],
)
def test_a_name_of_an_impossible_size_is_refused_before_it_is_read(
    kind: bytes, size: int, says: str, tmp_path: Path
) -> None:
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = kind, size
    with (tmp_path / "x.tar").open("wb") as file:
        file.write(name.tobuf(tarfile.GNU_FORMAT))
        file.truncate(1 << 32)
    with pytest.raises(EngineCorrupt, match=rf"x\.tar: .* {says}"):
        unpack(tmp_path / "x.tar", tmp_path / "out")


def test_a_sparse_file_is_refused(tmp_path: Path) -> None:
    sparse = tarfile.TarInfo("a")
    header = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:482] = bytes(96)
    header[483:495] = b"77777777777\0"
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "x.tar").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(EngineCorrupt, match=r"'a' is .* sparse"):
        unpack(tmp_path / "x.tar", tmp_path / "out")


def test_more_members_than_an_engine_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.artifact.tar_members.MAX_MEMBERS", 3)
    tar = make_tar(tmp_path / "x.tar", *((member(name), b"") for name in "abc"))
    with pytest.raises(EngineCorrupt, match=r"'c' is one too many: over 3"):
        unpack(tar, tmp_path / "out")


FORMS = ["engine.tar", "engine.tar.gz", "engine.tar.zst"]
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


def large_engine(path: Path, megabytes: int) -> Path:
    path.mkdir()
    incompressible = min(megabytes // 2, 10)
    with (path / "rank0.engine").open("wb") as file:
        for _ in range(megabytes - incompressible):
            file.write(b"weights " * (1 << 17))
        file.write(os.urandom(incompressible << 20))
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


@pytest.mark.full
@pytest.mark.parametrize("name", FORMS)
def test_memory_stays_under_200_mb(name: str, tmp_path: Path) -> None:
    tar = tmp_path / name
    for action, directory in (
        ("pack", large_engine(tmp_path / "e", 220)),
        ("unpack", tmp_path / "out"),
    ):
        peak = json.loads(run(action, directory, tar)[-1])["peak"]
        assert 10_000_000 < peak < 200_000_000
    assert (tmp_path / "out" / "rank0.engine").stat().st_size == 220 << 20


@pytest.mark.full
def test_memory_stays_under_200_mb_for_the_widest_zstd(tmp_path: Path) -> None:
    run("pack", large_engine(tmp_path / "e", 220), tmp_path / "engine.tar")
    options = {
        zstd.CompressionParameter.compression_level: 1,
        zstd.CompressionParameter.window_log: 27,
    }
    wide = zstd.ZstdFile(tmp_path / "w.tar.zst", "w", options=options)
    with (tmp_path / "engine.tar").open("rb") as plain, wide:
        shutil.copyfileobj(plain, wide, 1 << 20)
    peak = json.loads(run("unpack", tmp_path / "out", tmp_path / "w.tar.zst")[-1])["peak"]
    assert 128 << 20 < peak < 200_000_000


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "engine.tar"), (signal.SIGINT, "engine.tar.zst")]
)
def test_a_stopped_pack_leaves_the_existing_tar(
    number: signal.Signals, name: str, tmp_path: Path
) -> None:
    made = large_engine(tmp_path / "e", 4)
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
        ("engine.tar.zst", r"needs up to 21.0 MB, 8.4 MB free in {place}: No space left on device"),
    ],
)
def test_packing_on_a_full_disk_is_disk_full(
    name: str, said: str, small_disk: tuple[Path, list[str]], tmp_path: Path
) -> None:
    place, words = small_disk
    lines = run("pack", large_engine(tmp_path / "e", 20), place / name, *words)
    assert lines[0] == f"E2302 DiskFull: {place / name}: " + said.format(place=place)
    assert lines[2:] == []  # nothing is left there


@pytest.mark.parametrize("name", FORMS)
def test_unpacking_on_a_full_disk_is_disk_full(
    name: str, small_disk: tuple[Path, list[str]], tmp_path: Path
) -> None:
    place, words = small_disk
    tar = tmp_path / name
    run("pack", large_engine(tmp_path / "e", 20), tar)
    lines = run("unpack", place / "out", tar, *words)
    size = f"{tar.stat().st_size / 1e6:.1f} MB"
    wanted = {
        "engine.tar": f"needs {size}, 8.4 MB free in {place}",
        "engine.tar.gz": f"needs more than its gzip of {size}, 8.4 MB free in {place}: No space",
        "engine.tar.zst": f"needs more than its zstd of {size}, 8.4 MB free in {place}: No space",
    }
    assert lines[0].startswith(f"E2302 DiskFull: {tar}: {wanted[name]}")
    assert lines[2:] == []
