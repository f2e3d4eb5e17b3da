"""Small images of each format, and requests' parts of them."""

from __future__ import annotations

import base64
import zlib
from io import BytesIO
from typing import Any

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
PLACEHOLDER = "\x01"
"""What the double of vLLM takes for an image, one token."""
PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}\x01{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)


def image(kind: str = "PNG", size: tuple[int, int] = (40, 30), color: int = 0x336699) -> bytes:
    """An image file."""
    file = BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return file.getvalue()


def told(data: bytes) -> str:
    """What the double of vLLM says of an image."""
    decoded = Image.open(BytesIO(data)).convert("RGB")
    width, height = decoded.size
    return f"{width}x{height}:{zlib.crc32(decoded.tobytes()):08x}"


def bomb(width: int = 50_000, height: int = 50_000) -> bytes:
    """A PNG of few bytes, whose header says that it has very many pixels."""
    small = image()
    head = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + small[24:29]
    return small[:12] + head + zlib.crc32(head).to_bytes(4, "big") + small[33:]


def data_url(data: bytes, kind: str = "image/png") -> str:
    """The data: URL of a file."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(url: str, **values: Any) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": url, **values}}


def user(*parts: Any) -> dict[str, Any]:
    """A user's message, of texts and URLs of images."""
    content = [item if isinstance(item, dict) else {"type": "text", "text": item} for item in parts]
    return {"role": "user", "content": content}
