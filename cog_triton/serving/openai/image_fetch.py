"""Images of a chat, fetched from hosts of the allow-list IMAGE_HOSTS, by checked addresses (SSRF).

A host's name is resolved once and the connection made to an address found then, so that no second
answer of the name server counts (DNS rebinding). Redirects are not followed, proxies not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import httpx

from cog_triton.engines.base import Abilities
from cog_triton.errors import InvalidArgument, Overloaded
from cog_triton.pictures.image_limits import ImageLimits, ImagePart, read_data_url
from cog_triton.settings.addresses import AccessSettings
from cog_triton.system.pinned_http import PinnedTransport
from cog_triton.system.public_addresses import (
    HTTP_URL,
    Address,
    Resolver,
    host_rules,
    in_networks,
    is_public,
    names_host,
    resolve_host,
)
from cog_triton.system.redaction import redact_address
from cog_triton.text.chat import ImageForm, ImageURL, image_form
from cog_triton.text.tokenizer import EngineTokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatImages:
    """Images of chats with one model, and the form its template takes them in; thread-safe."""

    form: ImageForm
    limits: ImageLimits
    fetcher: ImageFetcher

    def load(self, urls: Sequence[ImageURL]) -> tuple[ImagePart, ...]:
        """The images at `urls`; raises E1005 naming the part at fault, E2107 under load."""
        deadline = time.monotonic() + self.fetcher.timeout
        images: list[ImagePart] = []
        left = self.limits.size
        for where, url in urls:
            if url[:5].lower() == "data:":
                data = read_data_url(where, url, self.limits)
            else:
                data = self.fetcher.fetch(where, url, left, deadline)
            images.append(ImagePart(where, data))
            self.limits.check(images)  # before the next one is fetched
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
    fetcher = ImageFetcher(host_rules(settings.image_hosts))
    limits = ImageLimits.of(settings)
    limits = replace(limits, count=min(limits.count, abilities.images))
    return ChatImages(form, limits, fetcher)


_TIMEOUT_S = 5.0
_AT_ONCE = 4
_CHUNK = 64 << 10
_HEADERS = {"User-Agent": "cog-triton", "Accept": "image/*", "Accept-Encoding": "identity"}


class ImageFetcher:
    """Fetches images by URL, a few at a time; thread-safe."""

    def __init__(
        self,
        hosts: tuple[str, ...],
        resolve: Resolver = resolve_host,
        timeout: float = _TIMEOUT_S,
    ) -> None:
        """`hosts` are allowed, by rules as in `public_addresses`.

        `timeout` is in seconds, for all images of a request together.
        """
        self.timeout = timeout
        self._hosts = hosts
        self._resolve = resolve
        self._turns = threading.BoundedSemaphore(_AT_ONCE)

    def fetch(self, where: str, url: str, most: int, deadline: float) -> bytes:
        """The file at `url`, of at most `most` bytes, until `deadline` of the monotonic clock.

        Raises E1005 naming the part `where`, E2107 while too many others fetch images.
        """
        parts = HTTP_URL.fullmatch(url)
        if parts is None:
            raise InvalidArgument(f"{where}: must be a data: URL, or one of http(s)://")
        if not self._hosts:
            raise InvalidArgument(
                f"{where}: images are fetched from no host (IMAGE_HOSTS); send a data: URL"
            )
        if not self._turns.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Overloaded("too many images are being fetched; try again, or send data: URLs")
        shown = f"{where}: {redact_address(url)[:200]!r}"
        try:
            host = parts["host"].strip("[]").rstrip(".").lower()
            addresses = self._addresses(shown, host)
            return asyncio.run(self._get(shown, url, addresses, most, deadline))
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            late = time.monotonic() >= deadline
            reason = f"took more than {self.timeout:g} s" if late else type(error).__name__
            raise InvalidArgument(f"{shown}: cannot be fetched: {reason}") from error
        finally:
            self._turns.release()

    def _addresses(self, shown: str, host: str) -> Sequence[Address]:
        """Addresses to connect to; the error is the same for unknown hosts and private ones."""
        addresses = [ipaddress.ip_address(text) for text in self._resolve(host)]
        if not addresses or not all(self._allows(host, one) for one in addresses):
            raise InvalidArgument(f"{shown}: its host is none that images may come from")
        return addresses

    def _allows(self, host: str, address: Address) -> bool:
        by_name = names_host(self._hosts, host) and is_public(address)
        return by_name or in_networks(self._hosts, address)

    async def _get(
        self, shown: str, url: str, addresses: Sequence[Address], most: int, deadline: float
    ) -> bytes:
        async def checked(_: str) -> Sequence[Address]:
            return addresses

        transport = PinnedTransport(checked, proxied=False)
        data = bytearray()
        async with (
            asyncio.timeout(deadline - time.monotonic()),
            httpx.AsyncClient(transport=transport, headers=_HEADERS, timeout=None) as client,
            client.stream("GET", httpx.URL(url).copy_with(userinfo=b"")) as response,
        ):
            if response.status_code != 200:
                raise InvalidArgument(
                    f"{shown}: its host answered {response.status_code}; redirects are not followed"
                )
            async for chunk in response.aiter_raw(_CHUNK):
                data += chunk
                if len(data) > most:
                    raise InvalidArgument(f"{shown}: has more than {most} bytes left for it")
        return bytes(data)
