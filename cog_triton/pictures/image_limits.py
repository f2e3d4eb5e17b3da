"""Limits of a request's images: how many, and bytes and pixels of all of them together."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote_to_bytes

from cog_triton.errors import InvalidArgument
from cog_triton.pictures.image_header import read_header

if TYPE_CHECKING:
    from cog_triton.settings.addresses import AccessSettings

_DATA_URL = re.compile(r"data:(?P<type>[\w./+-]*)(?P<parameters>(;[\w=./+-]+)*),", re.ASCII)
_SPACE = b" \t\r\n"
# Of base64 only these need an escape; Python takes 0.3 us for each of any.
_ESCAPED = {b"%2B": b"+", b"%2F": b"/", b"%3D": b"="}
_MOST_ESCAPES = 1 << 16


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Image of a request: the encoded file, and what names it in errors."""

    where: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits: `count` images of a request, and the `size` in bytes and `pixels` of all of them."""

    count: int = 16
    size: int = 16 << 20
    pixels: int = 32_000_000

    @classmethod
    def of(cls, settings: AccessSettings) -> Self:
        """The limits of `settings`."""
        return cls(settings.max_images, settings.max_image_bytes, settings.max_image_pixels)

    def check_count(self, name: str, count: int) -> None:
        """Raise E1005 for more images than a request may have."""
        if count > self.count:
            raise InvalidArgument(f"{name}: has {count} images; {self.count} at most (MAX_IMAGES)")

    def check(self, images: Sequence[ImagePart]) -> None:
        """Check images by their headers; raises E1005 naming the first one at fault."""
        size = pixels = 0
        for image in images:
            size += len(image.data)
            if size > self.size:
                raise self.too_large(image.where)
            try:
                header = read_header(image.data)
            except ValueError as error:
                raise InvalidArgument(f"{image.where}: {error}") from error
            pixels += header.pixels
            if pixels > self.pixels:
                raise InvalidArgument(
                    f"{image.where}: is of {header.width}x{header.height} pixels; all images of a"
                    f" request may have {self.pixels} (MAX_IMAGE_PIXELS)"
                )

    def too_large(self, where: str) -> InvalidArgument:
        """The error of images that have more bytes than they may."""
        return InvalidArgument(
            f"{where}: all images of a request may have {self.size} bytes (MAX_IMAGE_BYTES)"
        )


def decode_base64(where: str, text: bytes, limits: ImageLimits) -> bytes:
    """An image in base64; raises E1005."""
    plain = text.translate(None, _SPACE)
    if len(plain) * 3 // 4 > limits.size + 2:
        raise limits.too_large(where)
    try:
        return base64.b64decode(plain, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"{where}: is no base64: {error}") from error


def read_data_url(where: str, url: str, limits: ImageLimits) -> bytes:
    """The image in a ``data:`` URL (RFC 2397), which must be in base64; raises E1005."""
    head = _DATA_URL.match(url[:200])
    if head is None or ";base64" not in head["parameters"].lower():
        raise InvalidArgument(f"{where}: must be data:image/...;base64,...")
    if head["type"] and not head["type"].lower().startswith("image/"):
        raise InvalidArgument(f"{where}: is of type {head['type'][:80]!r}; must be an image's")
    if len(url) * 3 // 8 > limits.size:  # each character may be written as three
        raise limits.too_large(where)
    try:
        text = url[head.end() :].encode("ascii")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{where}: is no base64: it has other characters") from error
    if b"%" in text:
        for escape, byte in _ESCAPED.items():
            text = text.replace(escape, byte).replace(escape.lower(), byte)
        if text.count(b"%") > _MOST_ESCAPES:
            raise InvalidArgument(f"{where}: has more than {_MOST_ESCAPES} escapes of %XX")
        text = unquote_to_bytes(text)
    return decode_base64(where, text, limits)
