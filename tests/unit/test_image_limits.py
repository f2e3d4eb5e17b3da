"""Images: dimensions that decoders find, broken files of all kinds, limits, and data: URLs."""

from __future__ import annotations

import random
from contextlib import suppress
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import FORMATS, bomb, data_url, image
from PIL import Image

from cog_triton.errors import InvalidArgument
from cog_triton.pictures.image_limits import (
    ImageHeader,
    ImageLimits,
    ImagePart,
    read_data_url,
    read_header,
)

LIMITS = ImageLimits(count=2, size=10_000, pixels=5000)


@pytest.mark.parametrize(
    "url",
    [
        data_url(image()),
        data_url(image(), "image/jpeg"),  # the file itself says what it is
        data_url(image(), "IMAGE/PNG;charset=utf-8"),
        data_url(image(), ""),
        data_url(image()).replace("+", "%2B").replace("=", "%3d"),
        data_url(image())[:60] + "\n " + data_url(image())[60:],
    ],
)
def test_data_urls_are_read(url: str) -> None:
    assert read_data_url("a", url, LIMITS) == image()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:", "must be data:image"),
        ("data:image/png,abc", "must be data:image"),
        ("data:image/png;base64", "must be data:image"),
        ("data:text/html;base64,PGI+", "of type 'text/html'"),
        ("data:image/png;base64,abc", "no base64"),
        ("data:image/png;base64,a_-a", "no base64"),
        ("data:image/png;base64,äöüß", "no base64"),
        ("data:image/png;base64," + "A" * 20_000, "may have 10000 bytes .MAX_IMAGE_BYTES"),
        ("data:image/png;base64," + "%41" * 20_000, "may have 10000 bytes .MAX_IMAGE_BYTES"),
        ("data:image/png;base64," + "A" * 300_000, "may have 10000 bytes .MAX_IMAGE_BYTES"),
        ("data:" + "a" * 300_000, "must be data:image"),
    ],
)
def test_other_data_urls_are_refused_by_name(url: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^E1005 InvalidArgument: here: .*{words}"):
        read_data_url("here", url, LIMITS)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([b"no image"], "first: is no PNG"),
        ([image(), b"no image"], "second: is no PNG"),
        ([bomb()], "first: is of 50000x50000 pixels; .* 5000"),
        ([image(size=(60, 50)), image(size=(60, 50))], "second: is of 60x50 pixels"),
        ([image() + bytes(9999)], "first: .*10000 bytes .MAX_IMAGE_BYTES"),
        ([image() + bytes(5000), image() + bytes(5000)], "second: .*10000 bytes"),
    ],
)
def test_images_beyond_a_limit_are_refused_by_name(files: list[bytes], words: str) -> None:
    parts = [ImagePart(name, data) for name, data in zip(("first", "second"), files, strict=False)]
    with pytest.raises(InvalidArgument, match=words):
        LIMITS.check(parts)


def test_images_within_limits_pass() -> None:
    LIMITS.check([ImagePart("a", image()), ImagePart("b", image("WEBP"))])
    LIMITS.check_count("messages", 2)
    with pytest.raises(InvalidArgument, match="messages: has 3 images; 2 at most"):
        LIMITS.check_count("messages", 3)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (40, 30), (300, 1000)])
def test_dimensions_are_those_that_a_decoder_finds(kind: str, size: tuple[int, int]) -> None:
    assert read_header(image(kind, size)) == (kind, *size)


@pytest.mark.parametrize("options", [{"lossless": True}, {"exif": b"Exif\0\0"}, {"quality": 10}])
def test_all_kinds_of_webp_are_known(options: dict[str, object]) -> None:
    file = BytesIO()
    Image.new("RGBA", (33, 44), (1, 2, 3, 4)).save(file, "WEBP", **options)
    assert read_header(file.getvalue()) == ("WEBP", 33, 44)


def test_a_progressive_jpeg_with_metadata_is_known() -> None:
    file = BytesIO()
    made = Image.new("L", (123, 45))
    made.save(file, "JPEG", progressive=True, comment=b"\xff" * 3000, icc_profile=b"a" * 70000)
    assert read_header(file.getvalue()) == ("JPEG", 123, 45)


def test_a_bomb_is_known_by_its_header() -> None:
    assert read_header(bomb()) == ImageHeader("PNG", 50_000, 50_000)
    assert len(bomb()) < 1000


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_ends_early_is_refused_or_has_its_dimensions(kind: str) -> None:
    data = image(kind)
    for length in range(len(data)):
        with suppress(ValueError):
            assert read_header(data[:length]) == (kind, 40, 30)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG"),
        (b"BM" + bytes(60), "is no PNG"),
        (b"II*\0" + bytes(60), "is no PNG"),
        (bomb(0, 7), "0x7 pixels"),
        (b"\xff\xd8\xff" * 100, "is broken"),
        (b"\xff\xd8" + b"\xff\xe0\0\2" * 2000, "a JPEG without a frame header"),
        (b"\xff\xd8\xff\xe0\0\0" + bytes(60), "a JPEG without a frame header"),
        (b"RIFF\0\0\0\0WEBPJUNK" + bytes(60), "a WebP without a frame header"),
    ],
)
def test_other_files_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_header(data)


@given(st.sampled_from(FORMATS), st.integers(0, 1 << 32))
def test_broken_bytes_end_with_a_value_error_or_dimensions(kind: str, seed: int) -> None:
    data, chance = bytearray(image(kind)), random.Random(seed)
    for _ in range(5):
        data[chance.randrange(min(len(data), 64))] = chance.randrange(256)
    with suppress(ValueError):
        assert read_header(bytes(data)).pixels > 0
