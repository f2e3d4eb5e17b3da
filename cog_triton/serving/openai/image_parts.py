"""Image parts of a chat: loaded from their URLs, within the limits of a request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from cog_triton.engines.abilities import Abilities
from cog_triton.pictures.image_limits import ImageLimits, ImagePart, read_data_url
from cog_triton.serving.openai.image_fetch import ImageFetcher, ImageHosts
from cog_triton.settings.addresses import AccessSettings
from cog_triton.system.public_addresses import host_rules
from cog_triton.text.image_messages import ImageForm, ImageURL, image_form
from cog_triton.text.tokenizer import EngineTokenizer

_log = logging.getLogger(__name__)


class ChatImages:
    """Images of chats with one model, and the form its template takes them in; thread-safe."""

    def __init__(self, form: ImageForm, limits: ImageLimits, fetcher: ImageFetcher) -> None:
        self.form = form
        self._limits = limits
        self._fetcher = fetcher

    @property
    def count(self) -> int:
        """Images that a request may have."""
        return self._limits.count

    def check_count(self, urls: Sequence[ImageURL]) -> None:
        """Raise E1005 for more images than a request may have."""
        self._limits.check_count("messages", len(urls))

    def load(self, urls: Sequence[ImageURL]) -> tuple[ImagePart, ...]:
        """The images at `urls`; raises E1005 naming the part at fault, E2107 under load."""
        deadline = time.monotonic() + self._fetcher.timeout
        images: list[ImagePart] = []
        left = self._limits.size
        for where, url in urls:
            if url[:5].lower() == "data:":
                data = read_data_url(where, url, self._limits)
            else:
                data = self._fetcher.fetch(where, url, left, deadline)
            images.append(ImagePart(where, data))
            self._limits.check(images)  # before the next one is fetched
            left -= len(data)
        return tuple(images)


def chat_images(
    settings: AccessSettings, tokenizer: EngineTokenizer, abilities: Abilities
) -> ChatImages | None:
    """What chats do with images; None, with a warning, if the chat template cannot have any."""
    form = image_form(tokenizer, abilities.image_placeholder)
    if form is None:
        _log.warning("the chat template takes no images; set CHAT_TEMPLATE to one that does")
        return None
    fetcher = ImageFetcher(ImageHosts(host_rules(settings.image_hosts)))
    limits = ImageLimits.of(settings)
    limits = replace(limits, count=min(limits.count, abilities.images))
    return ChatImages(form, limits, fetcher)
