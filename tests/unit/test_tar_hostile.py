"""Hostile tars: whatever their headers say, unpacking ends with a code, within time and memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import tarfile
import time
import tracemalloc
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.artifact import engine_manifest, engine_tar, tar_members
from cog_triton.artifact.engine_manifest import MAX_TEXT
from cog_triton.errors import EngineCorrupt


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def block(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def extended(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header("pax", kind, len(records)) + block(records)


def record(key: str, value: str | bytes) -> bytes:
    rest = (
        b" " + key.encode() + b"=" + (value.encode() if isinstance(value, str) else value) + b"\n"
    )
    length = len(rest) + 1
    while length != len(str(length)) + len(rest):
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def long_name(name: bytes) -> bytes:
    return header("././@LongLink", tarfile.GNUTYPE_LONGNAME, len(name)) + block(name)


END = bytes(1024)
FILE = header("a")
HOSTILE: dict[str, bytes] = {
    "chained long names": long_name(b"a\0") * 2000 + FILE,
    "chained extended headers": extended(record("path", "a")) * 2000 + FILE,
    "chained global headers": extended(record("comment", "a"), tarfile.XGLTYPE) * 2000 + FILE,
    "global keywords": extended(
        b"".join(record(f"k{number}", "v") for number in range(65)), tarfile.XGLTYPE
    )
    + FILE,
    "a part over the file system's limit": header("b" * 256),
    "a name over the file system's limit": long_name(b"/".join([b"c" * 200] * 25)) + FILE,
    "a deep name": long_name(b"d/" * 200 + b"d") + FILE,
    "a link over the file system's limit": header("l", tarfile.SYMTYPE, link="m" * 300),
    "an empty link": header("l", tarfile.SYMTYPE),
    "a member of 1 TB": header("a", size=1 << 40),
    "escape in a name": header("a\x1b[2Jb"),
    "line end in a name": header("a\nEVERYTHING IS FINE"),
    "escape in a link": header("l", tarfile.SYMTYPE, link="\x1b]0;x\x07"),
    "bidirectional override": header("a\u202egnp.exe"),
    "undecodable name": header("a\udcff"),
    "NUL in an extended name": extended(record("path", "a\0b")) + FILE,
    "negative size": extended(record("size", "-5")) + FILE + block(b"abc"),
    "size beyond any file": extended(record("size", "9" * 60)) + FILE,
    "size of 5000 digits": extended(record("size", "9" * 5000)) + FILE,
    "offset beyond a C integer": extended(record("size", str(1 << 70))) + FILE + header("b"),
    "digits without an end": extended(b"1" * 60_000) + FILE,
    "records that look for their end": extended(b"5 aa\n" * 12_000) + FILE,
    "record beyond its header": extended(b"999999 path=a\n") + FILE,
    "record of no length": extended(b"0 path=a\n") + FILE,
    "charset that is none": extended(record("hdrcharset", b"\xff\xfe")) + FILE,
    "large extended header": extended(record("comment", "x" * 900_000)) + FILE,
    "sparse map": extended(record("GNU.sparse.map", "1,2,x")) + FILE,
    "sparse numbers": extended(record("GNU.sparse.size", "x") + record("GNU.sparse.offset", "y"))
    + FILE,
    "sparse 1.0": extended(record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0"))
    + header("s", size=512)
    + block(b"99999999\n" + b"x"),
}


def refused(content: bytes, directory: Path) -> EngineCorrupt:
    """The error of unpacking; nothing is left beside the tar, and little memory was used."""
    tar = directory / "hostile.tar"
    tar.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(EngineCorrupt) as caught:
            engine_tar.unpack(tar, directory / "out")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert [path.name for path in directory.iterdir()] == ["hostile.tar"]
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_header_is_refused(name: str, tmp_path: Path) -> None:
    """It takes no more than 200 times as long as a plain one does beside it; the best of tries."""

    def spent(content: bytes) -> float:
        started = time.thread_time()
        refused(content + END, tmp_path)
        return time.thread_time() - started

    assert any(spent(HOSTILE[name]) < 200 * spent(header("a\nb")) for _ in range(5))


def test_names_of_other_scripts_are_kept(tmp_path: Path) -> None:
    tar = tmp_path / "x.tar"
    with tarfile.open(tar, "w") as file:
        for name in ("größe.bin", "日本/モデル.bin", "with space"):
            file.addfile(tarfile.TarInfo(name), io.BytesIO())
    engine_tar.unpack(tar, tmp_path / "out")
    assert (tmp_path / "out" / "日本" / "モデル.bin").is_file()


@pytest.mark.full
def test_headers_are_forgotten_with_their_members(tmp_path: Path) -> None:
    with zstd.open(tmp_path / "x.tar.zst", "wb") as file:
        for number in range(4000):
            file.write(extended(record("comment", "x" * 60_000)) + header(f"f{number}"))
        file.write(END)
    (tmp_path / "fresh").mkdir()
    tracemalloc.start()
    engine_tar.extract(tmp_path / "x.tar.zst", tmp_path / "fresh")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(list((tmp_path / "fresh").iterdir())) == 4000
    assert peak < 32 << 20  # all of them together are 240 MB


def test_what_follows_the_end_is_bounded(tmp_path: Path) -> None:
    with zstd.open(tmp_path / "x.tar.zst", "wb") as file:
        file.write(FILE + END)
        for _ in range(200):
            file.write(bytes(1 << 20))
    with pytest.raises(EngineCorrupt, match="goes on for 64 MiB after the tar's end"):
        engine_tar.unpack(tmp_path / "x.tar.zst", tmp_path / "out")


def test_a_large_manifest_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "cog-triton.json").open("wb") as file:
        file.truncate(4 << 30)
    with pytest.raises(EngineCorrupt, match=f"has over {MAX_TEXT} bytes"):
        engine_manifest.load(tmp_path)


CONTROLS_THE_TERMINAL = '{"engine": "e", "files": {"a\\u001b[2J\\nfine": {"size": "x"}}}'


@pytest.mark.parametrize(
    "text", [CONTROLS_THE_TERMINAL, '{"seals":' + "[" * 200_000], ids=["escape", "endless"]
)
def test_a_hostile_manifest_is_refused_in_printable_words(text: str) -> None:
    with pytest.raises(EngineCorrupt) as caught:
        engine_manifest.parse(text.encode(), "m")
    assert str(caught.value).isprintable()


def test_an_unprintable_name_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(EngineCorrupt, match=r"'a\\x1b' has control"):
        engine_tar.pack({"a\x1b": b""}, tmp_path / "x.tar", lambda _: None)  # type: ignore[arg-type,return-value]
    assert list(tmp_path.iterdir()) == []


HEADERS = b"".join(
    [
        long_name(b"long/" * 20),
        FILE,
        extended(record("path", "größe") + record("size", "3") + record("mtime", "1.5")),
        header("b", size=3) + block(b"abc"),
        extended(record("comment", "all"), tarfile.XGLTYPE),
        header("l", tarfile.SYMTYPE, link="b"),
        END,
    ]
)
FIELDS = [(0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155)]
KINDS = [bytes([kind]) for kind in b"0123456789xgXLKSDVMN\0AZ"]
VALUES = st.sampled_from([*KINDS, b"\xff" * 12, b"7" * 12, b"../" * 4]) | st.binary(max_size=12)
EDIT = st.tuples(st.integers(0, len(HEADERS) // 512 - 1), st.sampled_from(FIELDS), VALUES)


@settings(max_examples=200)
@given(st.booleans(), st.lists(EDIT, min_size=1, max_size=4))
def test_a_tar_with_other_header_fields_unpacks_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
    packed: bool,
    edits: list[tuple[int, tuple[int, int], bytes]],
) -> None:
    data = bytearray(HEADERS)
    for number, (start, length), value in edits:
        at = 512 * number
        data[at + start : at + start + min(length, len(value))] = value[:length]
        data[at + 148 : at + 156] = b"        "
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    place = tmp_path_factory.mktemp("place")
    tar = place / "m.tar"
    tar.write_bytes(zstd.compress(bytes(data), 1) if packed else bytes(data))
    said = ""
    try:
        engine_tar.unpack(tar, place / "out")
    except EngineCorrupt as error:
        said = str(error)
    assert said.isprintable()
    assert {path.name for path in place.iterdir()} <= {"m.tar", "out"}


# Compressible and not, and over several of zstd's blocks and of our reads.
CONTENT = random.Random(0).randbytes(700_000) + b"weights " * 300_000


def plain() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("a", "b"):
            member = tarfile.TarInfo(name)
            member.size = len(CONTENT)
            tar.addfile(member, io.BytesIO(CONTENT))
    return file.getvalue()


PLAIN = plain()


def framed(*parts: bytes) -> bytes:
    """A stream of several frames."""
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    return b"".join(zstd.compress(part, options=checked) for part in parts)


def wide(window_log: int) -> bytes:
    options = {
        zstd.CompressionParameter.window_log: window_log,
        zstd.CompressionParameter.checksum_flag: 1,
        zstd.CompressionParameter.content_size_flag: 0,
    }
    packer = zstd.ZstdCompressor(options=options)
    return packer.compress(PLAIN) + packer.flush()


def read(path: Path, content: bytes) -> dict[str, bytes]:
    path.write_bytes(content)
    return {
        member.name: member.content.readall()
        for member in tar_members.read(path)
        if member.content is not None
    }


def compressed(form: tar_members.Form, content: bytes = PLAIN, step: int = 1 << 20) -> bytes:
    file = io.BytesIO()
    with tar_members.compressing(file, form) as stream:
        for start in range(0, len(content), step):
            stream.write(content[start : start + step])
    return file.getvalue()


# Of `PLAIN`, eight times, by zstd 1.5.7; first made by another library and by one thread.
SHA256_OF_ZSTD = "cdcfb70ad14e852ad010379e040f134ac3d0c64e73683e0bc68c53ee849e5600"
WHOLE = {"gzip": compressed("gzip"), "zstd": compressed("zstd")}


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 64])
def test_zstd_output_does_not_depend_on_the_number_of_cores(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    content = PLAIN * 8  # work for more than one thread
    assert zstd.decompress(compressed("zstd", content)) == content
    assert hashlib.sha256(compressed("zstd", content)).hexdigest() == SHA256_OF_ZSTD


def test_gzip_contains_neither_time_nor_name(tmp_path: Path) -> None:
    with (
        (tmp_path / "named.tar.gz").open("wb") as file,
        tar_members.compressing(file, "gzip") as to,
    ):
        to.write(PLAIN)
    assert (tmp_path / "named.tar.gz").read_bytes() == WHOLE["gzip"]
    assert WHOLE["gzip"][3:8] == bytes(5)
    assert gzip.decompress(WHOLE["gzip"]) == PLAIN


@pytest.mark.parametrize(
    "content",
    [
        *WHOLE.values(),
        gzip.compress(PLAIN[:1000]) + gzip.compress(PLAIN[1000:]),
        framed(PLAIN),
        framed(PLAIN[:1000], b"", PLAIN[1000:700_001], PLAIN[700_001:]),
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00pzst" + framed(PLAIN),
        wide(27),
    ],
    ids=["gzip", "zstd", "two of gzip", "sized", "frames", "skippable", "wide"],
)
def test_every_form_of_compression_is_read(content: bytes, tmp_path: Path) -> None:
    assert read(tmp_path / "x", content) == {"a": CONTENT, "b": CONTENT}


@pytest.mark.parametrize("form", ["gzip", "zstd"])
@given(part=st.one_of(st.floats(0, 0.9999), st.integers(-40, -1)))
def test_a_truncated_stream_is_refused_wherever_it_ends(
    form: str, tmp_path_factory: pytest.TempPathFactory, part: float
) -> None:
    content = WHOLE[form]
    cut = content[: int(len(content) * part) if part >= 0 else int(part)]
    with pytest.raises(EngineCorrupt, match=r"/cut.*(tar|member)"):
        read(tmp_path_factory.mktemp("cut") / "cut", cut)


@pytest.mark.parametrize("checksum", [1, 0])
def test_zstd_cut_inside_an_incompressible_block_is_refused(checksum: int) -> None:
    options = {zstd.CompressionParameter.checksum_flag: checksum}
    content = zstd.compress(random.Random(1).randbytes(200_000), options=options)
    for missing in range(1, 400):
        with pytest.raises(EOFError):
            drain(content[:-missing])
    drain(content)


def drain(content: bytes) -> None:
    with tar_members.decompressing(io.BufferedReader(io.BytesIO(content))):
        pass


@pytest.mark.parametrize("form", ["gzip", "zstd"])
@pytest.mark.parametrize("behind", [b"garbage", b"\x28\xb5", b"PK\x03\x04" * 400])
def test_trailing_bytes_are_refused(form: str, behind: bytes, tmp_path: Path) -> None:
    with pytest.raises(EngineCorrupt, match="/x: not a whole, readable tar: "):
        read(tmp_path / "x", WHOLE[form] + behind)


@pytest.mark.parametrize(("form", "back"), [("gzip", 8), ("gzip", 2), ("zstd", 1), ("zstd", 4)])
def test_the_checksum_of_the_stream_is_verified(form: str, back: int, tmp_path: Path) -> None:
    content = bytearray(WHOLE[form])
    content[-back] ^= 1
    with pytest.raises(EngineCorrupt, match=r"/x: .*(CRC|[Cc]hecksum|length)"):
        read(tmp_path / "x", bytes(content))


def test_a_too_large_zstd_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        EngineCorrupt, match=f"a zstd window of {1 << 28} bytes, over {tar_members.MAX_WINDOW}"
    ):
        read(tmp_path / "x", wide(28))
    later = framed(PLAIN[:1000]) + wide(30)
    with pytest.raises(EngineCorrupt, match="too much memory"):
        read(tmp_path / "x", later)
