"""Access control: the API key, and what keeps a web page from driving a server without one."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from cog_triton import errors
from cog_triton.door.message import Refused, Request

_LOCAL = "localhost"
_NO_KEY = "as no COG_TRITON_API_KEY is set"


@dataclass(frozen=True, slots=True)
class Access:
    """Who may send a request.

    With `api_key` whoever sends it, as ``Authorization: Bearer KEY``. Without one everybody, but
    on a `loopback` address only programs: a browser names the page's site in Origin, and after
    DNS rebinding the page's name in Host, so both must be of this machine, and a body from a
    page must say that it is JSON, which no page may send elsewhere unasked.
    """

    api_key: str | None
    loopback: bool

    def check(self, request: Request) -> None:
        """Raise E1007 unless the request may pass."""
        if self.api_key is not None:
            if not self._has_key(request):
                raise errors.Unauthorized("send the server's API key, as Authorization: Bearer KEY")
        elif self.loopback:
            _require_local(request)

    def check_stop(self, request: Request) -> None:
        """Raise E1007 unless the request may end the server: with the key, or from here."""
        if self.api_key is not None and self._has_key(request):
            return
        if not is_loopback(request.peer):
            raise errors.Unauthorized("only this machine may stop the server, or the API key")
        _require_local(request)

    def _has_key(self, request: Request) -> bool:
        scheme, _, key = request.header(b"authorization").partition(b" ")
        sent = key.strip() if scheme.lower() == b"bearer" else b""
        return hmac.compare_digest(sent, (self.api_key or "").encode())


def is_loopback(address: str) -> bool:
    """Whether an IP address is of this machine alone; a name other than localhost is not."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address == _LOCAL
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped:
        return found.ipv4_mapped.is_loopback
    return found.is_loopback


def _require_local(request: Request) -> None:
    host = request.header(b"host").decode("latin-1")
    if host and not (request.host_name and _is_local(request.host_name)):
        raise _forbidden(f"Host={host[:80]!r}: must be an IP address or localhost, {_NO_KEY}")
    if request.method in ("GET", "HEAD"):
        return
    origin = request.header(b"origin").decode("latin-1")
    site = request.header(b"sec-fetch-site")
    if not origin and not site:
        return
    if site == b"cross-site" or (origin and not _is_local(_host_of(origin))):
        raise _forbidden(
            f"Origin={origin[:80]!r}: pages of other sites may not use this server, {_NO_KEY}"
        )
    kind = request.header(b"content-type").partition(b";")[0].strip().lower()
    if request.body and kind != b"application/json":
        raise _forbidden("Content-Type: must be application/json in a page's request")


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


@lru_cache(maxsize=64)
def _is_local(name: str) -> bool:
    """Whether a host is named by an address, which no DNS answer can redirect, or is localhost."""
    name = name.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == _LOCAL or name.endswith(f".{_LOCAL}")
    return True


def _forbidden(rule: str) -> Refused:
    return Refused(403, errors.Unauthorized(rule))
