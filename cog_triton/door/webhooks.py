"""Webhooks of requests: the URLs they may name (WEBHOOK_HOSTS), and what coglet gets instead."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from cog_triton.errors import InvalidArgument
from cog_triton.settings import Settings
from cog_triton.system.public_addresses import (
    HTTP_URL,
    Address,
    Resolver,
    host_rules,
    in_networks,
    is_public,
    names_host,
    plain_address,
    resolve_host,
)
from cog_triton.system.redaction import redact_address

_MAX_URL = 8192


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
        return cls(host_rules(settings.webhook_hosts), loopback=_is_loopback(settings.cog_host))

    def allow_name(self, host: str) -> bool:
        """Whether `host` is allowed by name, whatever its addresses."""
        return names_host(self.hosts, host)

    def allow_address(self, address: Address) -> bool:
        """Whether a host with `address` is allowed."""
        if self.hosts:
            return in_networks(self.hosts, address)
        if plain_address(address).is_loopback:
            return self.loopback
        return is_public(address)


def check_webhook(
    url: object, rules: WebhookRules, resolve: Resolver = resolve_host
) -> tuple[Address, ...]:
    """Check the `webhook` of a request; returns the host's addresses, all of them allowed.

    Raises:
        InvalidArgument: not an http(s) URL, or its host is not allowed. The text is the same for a
            host that is unknown and one that is private, so that it tells nothing of the network.
    """
    parts = HTTP_URL.fullmatch(url) if isinstance(url, str) else None
    if parts is None:
        shown = "" if not isinstance(url, str) else f"={redact_address(url)[:200]!r}"
        raise InvalidArgument(f"webhook{shown}: must be an http(s):// URL")
    if len(parts[0]) > _MAX_URL:
        raise InvalidArgument(f"webhook: {len(parts[0])} characters; must be at most {_MAX_URL}")
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
