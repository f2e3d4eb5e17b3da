"""Double of vllm/multimodal/media/image.py: the loader of images."""

from io import BytesIO
from typing import Any

from PIL import Image


class MediaWithBytes:
    def __init__(self, media: Any, original_bytes: bytes) -> None:
        self.media = media
        self.original_bytes = original_bytes


class ImageMediaIO:
    def __init__(self, image_mode: str = "RGB", **kwargs: Any) -> None:
        self.image_mode = image_mode

    def load_bytes(self, data: bytes) -> MediaWithBytes:
        try:
            image = Image.open(BytesIO(data))
            image.load()
            image = image.convert(self.image_mode)
        except (OSError, SyntaxError) as e:
            raise ValueError(f"Failed to load image: {e}") from e
        return MediaWithBytes(image, data)
