"""Images of a request: how many, and bytes and pixels of all of them together.

Formats and dimensions of PNG, JPEG, WebP and GIF are read from headers, without decoding: what a
decoder would allocate is known, and can be refused, before one sees the file (decompression bomb).
Formats: PNG (RFC 2083 section 4.1.1), JPEG (ITU-T T.81 annex B), WebP (RFC 9649 section 2), GIF89a
section 18.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import unquote_to_bytes

from cog_triton.errors import InvalidArgument

if TYPE_CHECKING:
    from cog_triton.settings.addresses import AccessSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Names of the formats, as Pillow has them."""
_PNG = b"\x89PNG\r\n\x1a\n"
# Frame headers of JPEG; of the markers between them, C4, C8 and CC are something else.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_FILL = re.compile(rb"\xff*")
_MOST_SEGMENTS = 1000


class ImageHeader(NamedTuple):
    """Format and dimensions of an image, in pixels."""

    format: str
    width: int
    height: int

    @property
    def pixels(self) -> int:
        """Pixels of the whole image."""
        return self.width * self.height


def read_header(data: bytes) -> ImageHeader:
    """The header of an image; raises ValueError with what is wrong with it."""
    if data.startswith(_PNG):
        header = _png(data)
    elif data.startswith(b"\xff\xd8\xff"):
        header = _jpeg(data)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        header = _webp(data)
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        size = _exactly(data, 6, 4)
        header = ImageHeader("GIF", _little(size[:2]), _little(size[2:]))
    else:
        raise ValueError("is no PNG, JPEG, WebP or GIF")
    if not header.pixels:
        raise ValueError(f"is broken: {header.format} of {header.width}x{header.height} pixels")
    return header


def _png(data: bytes) -> ImageHeader:
    if _exactly(data, 8, 8) != b"\0\0\0\x0dIHDR":
        raise ValueError("is broken: a PNG without its header")
    size = _exactly(data, 16, 8)
    return ImageHeader("PNG", _big(size[:4]), _big(size[4:]))


def _jpeg(data: bytes) -> ImageHeader:
    at = 2
    for _ in range(_MOST_SEGMENTS):
        if _exactly(data, at, 1) != b"\xff":
            break
        at = _FILL.match(data, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        marker = _exactly(data, at, 1)[0]
        at += 1
        if marker in _ALONE:
            continue
        if marker in (0xD9, 0xDA):  # the end, or a scan before any frame
            break
        length = _big(_exactly(data, at, 2))
        if length < 2:
            break
        if marker in _FRAMES:
            size = _exactly(data, at + 3, 4)
            return ImageHeader("JPEG", _big(size[2:]), _big(size[:2]))
        at += length
    raise ValueError("is broken: a JPEG without a frame header")


def _webp(data: bytes) -> ImageHeader:
    kind, body = _exactly(data, 12, 4), _exactly(data, 20, 10)
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        return ImageHeader("WEBP", _little(body[6:8]) & 0x3FFF, _little(body[8:10]) & 0x3FFF)
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = _little(body[1:5])
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        return ImageHeader("WEBP", _little(body[4:7]) + 1, _little(body[7:10]) + 1)
    raise ValueError("is broken: a WebP without a frame header")


def _exactly(data: bytes, at: int, count: int) -> bytes:
    found = data[at : at + count]
    if len(found) < count:
        raise ValueError("is broken: the file ends within its header")
    return found


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


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
        return cls(settings.max_images, settings.max_image_bytes)

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
                    f" request may have {self.pixels}"
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
