"""Compressed tars: reproducible, verified to the end, in bounded memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import tarfile
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.artifact import tar_members
from cog_triton.errors import EngineCorrupt

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
