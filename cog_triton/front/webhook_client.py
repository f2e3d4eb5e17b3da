"""HTTP client of webhooks: every connection, after redirects too, goes to a checked address."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from cog_triton.front.message import Headers
from cog_triton.system.pinned_http import Check, PinnedTransport

_MAX_REDIRECTS = 10
_CONNECT_S = 5.0
_NOWHERE = httpx.Request("GET", "http://127.0.0.1:0")


class WebhookClient:
    """Posts webhooks, with the certificates of the system and of httpx (SSL_CERT_FILE)."""

    def __init__(self, check: Check) -> None:
        """`check` has the allowed addresses of a URL's host, or raises E1005.

        To be called on a thread: it does what httpx would on its first use, half a second of it.
        """
        with suppress(httpx.TransportError):
            asyncio.run(httpx.AsyncHTTPTransport(verify=False).handle_async_request(_NOWHERE))
        # No receiver's cookies are kept: they would be sent for other predictions.
        cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._client = httpx.AsyncClient(
            transport=PinnedTransport(check, proxied=True), cookies=cookies
        )

    async def post(self, url: str, headers: Headers, body: bytes, seconds: float) -> int:
        """Status of the answer, whose body is not read.

        Raises:
            InvalidArgument: the host, or one that it redirects to, is not allowed.
            ConnectionError: no answer within `seconds`.
        """
        try:
            return await asyncio.wait_for(self._follow(url, headers, body), seconds)
        except TimeoutError as error:
            raise ConnectionError(f"no answer within {seconds:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _follow(self, url: str, headers: Headers, body: bytes) -> int:
        timeouts = {"timeout": httpx.Timeout(None, connect=_CONNECT_S).as_dict()}
        request = httpx.Request("POST", url, headers=headers, content=body, extensions=timeouts)
        for _ in range(1 + _MAX_REDIRECTS):
            response = await self._client.send(request, stream=True)
            await response.aclose()
            if response.next_request is None:
                return response.status_code
            request = response.next_request
        raise httpx.TooManyRedirects(f"more than {_MAX_REDIRECTS} redirects")
