"""Addresses of hosts that clients name: resolution, and which of them are public (SSRF)."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Resolver = Callable[[str], Sequence[str]]
# Stricter than any parser: some take a backslash for a slash, or decode %2e in a host.
HTTP_URL = re.compile(
    r"https?://([\w.~!$&'()*+,;=:%-]*@)?(?P<host>[\w.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?([/?#][!-\[\]-~]*)?",
    re.IGNORECASE | re.ASCII,
)
"""URL of a web page, of ASCII alone; its group `host` may have brackets."""
_ANY = "*"
_NAT64 = IPv6Network("64:ff9b::/96")


def resolve_host(host: str) -> list[str]:
    """Addresses of `host` by the system's resolver, which blocks; none if there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def plain_address(address: Address) -> Address:
    """Where packets to `address` end: of an IPv6 address that embeds an IPv4 one, that."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    embedded = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
    return embedded or address


def is_public(address: Address) -> bool:
    """Whether `address` is one of the internet: not private, loopback, link-local or shared."""
    plain = plain_address(address)
    return plain.is_global and not plain.is_multicast


def host_rules(text: str) -> tuple[str, ...]:
    """Rules of an allow-list, as a setting has it: separated by commas."""
    return tuple(filter(None, (rule.strip().lower().rstrip(".") for rule in text.split(","))))


def names_host(rules: Sequence[str], host: str) -> bool:
    """Whether a rule names `host`: the name itself, ``*.domain`` (not the domain), or ``*``."""
    return any(
        rule in (_ANY, host) or (rule.startswith("*.") and host.endswith(rule[1:]))
        for rule in rules
    )


def in_networks(rules: Sequence[str], address: Address) -> bool:
    """Whether a rule is a network, or an address, that `address` is in."""
    plain = plain_address(address)
    return any(plain in network for network in map(_network, rules) if network)


def _network(rule: str) -> IPv4Network | IPv6Network | None:
    try:
        return ipaddress.ip_network(rule, strict=False)
    except ValueError:
        return None
