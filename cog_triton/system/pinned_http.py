"""HTTP transport whose every connection, after redirects too, goes to a checked address (SSRF)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from urllib.request import getproxies, proxy_bypass

import httpx

from cog_triton.system.public_addresses import Address

Check = Callable[[str], Awaitable[Sequence[Address]]]
_LAST_PORT = 65535
_ONCE = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""No connection is used again: of two names with one address, one's certificate was checked."""


class PinnedTransport(httpx.AsyncBaseTransport):
    """Connects to a checked address, not to the name; if `proxied`, by the environment's proxy."""

    def __init__(self, check: Check, *, proxied: bool) -> None:
        """`check` has the allowed addresses of a URL's host, or raises E1005."""
        self._check, self._proxied = check, proxied
        self._tls = httpx.create_ssl_context()  # SSL_CERT_FILE
        self._tls.load_default_certs()
        self._by_proxy: dict[str | None, httpx.AsyncHTTPTransport] = {}
        self._transport(None)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        addresses = await self._check(str(url))
        transport = self._transport(proxy := _proxy_of(url) if self._proxied else None)
        if proxy is not None:
            return await transport.handle_async_request(request)
        if (url.port or 0) > _LAST_PORT:
            raise httpx.ConnectError(f"there is no port {url.port}")
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
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return None if not proxy or proxy_bypass(url.host) else proxy
