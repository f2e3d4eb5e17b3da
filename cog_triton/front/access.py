"""Access control: API keys, and what keeps a web page from driving a server without one."""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast
from urllib.parse import urlsplit

from prometheus_client import Counter, disable_created_metrics, generate_latest

from cog_triton import errors
from cog_triton.front.keyring import Api, Key, Keyring, sha256_of
from cog_triton.front.message import Answer, Refused, Request
from cog_triton.serving.tenant_limits import TokenBucket
from cog_triton.serving.tenants import MOST_TENANTS, OTHER
from cog_triton.system.redaction import KEY_HEADERS, sent_key

_LOCAL = "localhost"
_SEND_KEY = "send the server's API key, as Authorization: Bearer KEY"
_NO_KEY = "as no COG_TRITON_API_KEY is set"
_EACH, _ALL = 60, 600
_MOST_PEERS = 4096
_MOST_GOOD = 64
_COUNTED = (401, 403, 429)
_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class GuessLimit:
    """Rate limit of wrong keys: 60 at once and one a second from an address, or an IPv6 /64.

    Beyond it, the address is let in with keys alone that it has used before, such as those of
    others behind the same proxy. Of all addresses together 600 at once and ten a second are tried;
    beyond that, one a minute of each. It knows 4096 addresses that guess, and while all of them
    do, newcomers have to wait; those with right keys are apart.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()
        self._good: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        self._all = TokenBucket(clock(), _ALL)

    def check(self, address: str, sent: bytes, right: bool) -> None:
        """Raise E2107, with 429, for a key of an address that has guessed too often."""
        name, now = network_of(address), self._clock()
        made = sha256_of(sent) if right else ""
        if made in self._good.get(name, ()):
            self._good.move_to_end(name)
            return
        peer = self._peers.get(name) or TokenBucket(now, _EACH)
        level, crowded = peer.level(now, _EACH), self._all.level(now, _ALL) < 1
        is_late = name not in self._peers and len(self._peers) >= _MOST_PEERS
        if crowded and (level < _EACH or is_late):
            rule = "too many wrong keys, of this address or many others; try again in a minute"
            raise Refused(429, errors.Overloaded(rule))
        if level < 1:
            rule = "too many wrong keys from this address; it may send one a second"
            raise Refused(429, errors.Overloaded(rule))
        if right:
            good = self._good.setdefault(name, OrderedDict())
            good[made] = None
            _keep(good, _MOST_GOOD)
            _keep(self._good, _MOST_PEERS)
            return
        peer.take(_EACH if crowded else 1)
        if not crowded:
            self._all.take(1)
        self._peers[name] = peer
        self._peers.move_to_end(name)
        _keep(self._peers, _MOST_PEERS)


def _keep(of: OrderedDict[str, Any], most: int) -> None:
    if len(of) > most:
        of.popitem(last=False)


class Refusals:
    """Counts of what was refused for want of a right, by status and tenant, for /metrics.

    Tenants are those of the keyring alone, so that nobody adds labels; the first `MOST_TENANTS`.
    """

    def __init__(self) -> None:
        cast(Any, disable_created_metrics)()
        text = "Requests that the server refused at its ports"
        labels = ("status", "tenant")
        self.counter = Counter("cog_triton_door_refused", text, labels, registry=None)
        self._tenants = {""}

    def count(self, refused: Refused) -> None:
        """Count a refusal, if it is one of 401, 403 and 429."""
        if refused.status in _COUNTED:
            known = refused.tenant in self._tenants or len(self._tenants) <= MOST_TENANTS
            name = refused.tenant if known else OTHER
            self._tenants.add(name)
            self.counter.labels(refused.status, name).inc()

    def with_metrics(self, status: int, body: bytes) -> Answer | None:
        """Metrics of Triton with these."""
        return Answer(200, body + generate_latest(self.counter), _TYPE) if status == 200 else None


@lru_cache(maxsize=256)
def network_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((int(found), 64), strict=False))


@dataclass(frozen=True, slots=True)
class Access:
    """Who may send a request.

    With `keyring`, whoever sends one of its keys (see `sent_key`), for the APIs that it is for;
    with `api_key` alone whoever sends that. Without both everybody, but on a `loopback` address
    only programs: a browser names the page's site in Origin, and after DNS rebinding the page's
    name in Host, so both must be of this machine, and a body from a page must say that it is
    JSON.
    """

    api_key: str | None
    loopback: bool
    keyring: Keyring | None = None
    guesses: GuessLimit = field(default_factory=GuessLimit)
    refusals: Refusals = field(default_factory=Refusals)

    @property
    def locked(self) -> bool:
        """Whether requests need a key."""
        return self.keyring is not None or self.api_key is not None

    def check(self, request: Request, api: Api) -> Request:
        """The request with its tenant, if a key tells it; raises E1007 unless it may pass."""
        if not self.locked:
            if self.loopback:
                _require_local(request)
            return request
        key = self._key_of(request)
        if key is None:
            return request
        if api not in key.apis:
            rule = f"the key of {key.name} is not for {api}"
            raise Refused(403, errors.Unauthorized(rule), key.name)
        return replace(request, tenant=key)

    def check_stop(self, request: Request) -> None:
        """Raise E1007 unless the request may end the server: with the key, or from here."""
        if self.locked and any(name in KEY_HEADERS for name, _ in request.headers):
            self.check(request, "admin")
        elif is_loopback(request.peer):
            _require_local(request)
        else:
            raise errors.Unauthorized("only this machine may stop the server, or the API key")

    def _key_of(self, request: Request) -> Key | None:
        """The key that a request has brought, where there are several; raises E1007 without one."""
        sent = sent_key(request.headers)
        if not sent:
            raise errors.Unauthorized(_SEND_KEY)
        found = self.keyring.find(sent) if self.keyring else None
        right = found is not None
        if self.keyring is None:
            right = hmac.compare_digest(sent, (self.api_key or "").encode())
        self.guesses.check(request.peer, sent, right)
        if not right:
            raise errors.Unauthorized(_SEND_KEY)
        if found is not None and found.expired:
            rule = f"the key {found.id} of {found.name} has expired"
            raise Refused(401, errors.Unauthorized(rule), found.name)
        return found


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
