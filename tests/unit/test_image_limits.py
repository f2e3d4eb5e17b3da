"""Limits of images, and data: URLs."""

from __future__ import annotations

import base64

import pytest
from image_files import bomb, data_url, image

from cog_triton.errors import InvalidArgument
from cog_triton.pictures.image_limits import ImageLimits, ImagePart, read_data_url

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
        ([bomb()], "first: is of 50000x50000 pixels; .* 5000 .MAX_IMAGE_PIXELS"),
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


def test_base64_is_what_the_standard_says() -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(range(256))).decode()
    assert read_data_url("a", url, LIMITS) == bytes(range(256))
