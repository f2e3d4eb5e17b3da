"""Webhook allow-list: which URLs Cog may post the events of a prediction to (WEBHOOK_HOSTS)."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from cog_triton.download.redaction import redact_address
from cog_triton.errors import InvalidArgument
from cog_triton.settings import Settings

Address = IPv4Address | IPv6Address
Resolver = Callable[[str], Sequence[str]]
_ANY = "*"
# Stricter than any parser: Cog's takes a backslash for a slash, and decodes %2e in a host.
_URL = re.compile(
    r"https?://([\w.~!$&'()*+,;=:%-]*@)?(?P<host>[\w.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?([/?#][!-\[\]-~]*)?",
    re.IGNORECASE | re.ASCII,
)
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class WebhookRules:
    """Hosts that webhooks may go to.

    Without `hosts`: every host with public addresses only, and loopback ones with `loopback`. Else
    only those named: a host name, ``*.domain`` (not the domain itself), an address or network, or
    ``*`` for every host.
    """

    hosts: tuple[str, ...] = ()
    loopback: bool = False

    @classmethod
    def of(cls, settings: Settings) -> WebhookRules:
        """Rules of WEBHOOK_HOSTS; loopback is allowed where only this machine reaches Cog."""
        return cls(settings.webhook_host_names, loopback=_is_loopback(settings.cog_host))

    def allow_name(self, host: str) -> bool:
        """Whether `host` is allowed by name, whatever its addresses."""
        return any(
            rule in (_ANY, host) or (rule.startswith("*.") and host.endswith(rule[1:]))
            for rule in self.hosts
        )

    def allow_address(self, address: Address) -> bool:
        """Whether a host with `address` is allowed."""
        plain = _embedded_ipv4(address) or address
        if not self.hosts:
            if plain.is_loopback:
                return self.loopback
            return plain.is_global and not plain.is_multicast
        return any(plain in network for network in map(_network, self.hosts) if network)


def resolve_host(host: str) -> list[str]:
    """Addresses of `host` by the system's resolver, which blocks; none if there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def check_webhook(
    url: object, rules: WebhookRules, resolve: Resolver = resolve_host
) -> tuple[Address, ...]:
    """Check the `webhook` of a request; returns the host's addresses, all of them allowed.

    Cog resolves the name again, and follows redirects: what connects for it has to check each
    address that it connects to by `WebhookRules.allow_address`, too.

    Raises:
        InvalidArgument: not an http(s) URL, or its host is not allowed. The text is the same for a
            host that is unknown and one that is private, so that it tells nothing of the network.
    """
    parts = _URL.fullmatch(url) if isinstance(url, str) else None
    if parts is None:
        shown = "" if not isinstance(url, str) else f"={redact_address(url)[:200]!r}"
        raise InvalidArgument(f"webhook{shown}: must be an http(s):// URL")
    host = parts["host"].strip("[]").rstrip(".").lower()
    addresses = tuple(ipaddress.ip_address(text) for text in resolve(host))
    if rules.allow_name(host):
        return addresses
    if addresses and all(map(rules.allow_address, addresses)):
        return addresses
    rule = "must be one of WEBHOOK_HOSTS" if rules.hosts else "has no public address"
    raise InvalidArgument(
        f"webhook={redact_address(str(url))[:200]!r}: its host {rule}; WEBHOOK_HOSTS of the server"
        " names the hosts that webhooks may go to"
    )


def _embedded_ipv4(address: Address) -> IPv4Address | None:
    """The IPv4 address that packets to an IPv6 `address` may end at."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]


def _network(rule: str) -> IPv4Network | IPv6Network | None:
    try:
        return ipaddress.ip_network(rule, strict=False)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
