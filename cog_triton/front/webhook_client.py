"""HTTP client of webhooks: every connection, after redirects too, goes to a checked address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.request import getproxies, proxy_bypass

import httpx

from cog_triton.front.message import Headers
from cog_triton.system.public_addresses import Address

Check = Callable[[str], Awaitable[Sequence[Address]]]

_MAX_REDIRECTS = 10
_CONNECT_S = 5.0
_NOWHERE = httpx.Request("GET", "http://127.0.0.1:0")
_ONCE = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""No connection is used again: of two names with one address, one's certificate was checked."""


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
        self._client = httpx.AsyncClient(transport=_Checked(check), cookies=cookies)

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


class _Checked(httpx.AsyncBaseTransport):
    """Connects to the checked address, not the name; or through the proxy of the environment."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._tls = httpx.create_ssl_context()
        self._tls.load_default_certs()
        self._by_proxy: dict[str | None, httpx.AsyncHTTPTransport] = {}
        self._transport(None)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        addresses = await self._check(str(url))
        transport = self._transport(proxy := _proxy_of(url))
        if proxy is not None:
            return await transport.handle_async_request(request)
        failure: httpx.TransportError = httpx.ConnectError("its name has no address")
        for address in addresses:
            pinned = httpx.Request(
                request.method,
                url.copy_with(host=str(address)),
                headers=request.headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": url.host.rstrip(".")},
            )
            try:
                return await transport.handle_async_request(pinned)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure

    async def aclose(self) -> None:
        for transport in self._by_proxy.values():
            await transport.aclose()

    def _transport(self, proxy: str | None) -> httpx.AsyncHTTPTransport:
        try:
            if proxy not in self._by_proxy:
                self._by_proxy[proxy] = httpx.AsyncHTTPTransport(
                    verify=self._tls, proxy=proxy, limits=_ONCE
                )
            return self._by_proxy[proxy]
        except (ValueError, ImportError) as error:  # such as of a SOCKS proxy
            raise httpx.ProxyError(str(error)) from error


def _proxy_of(url: httpx.URL) -> str | None:
    """The proxy that the user's environment names for `url`."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return None if not proxy or proxy_bypass(url.host) else proxy
