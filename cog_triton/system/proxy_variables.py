"""Proxy variables of the environment: one proxy for Cog's parent alone, the user's for the rest.

Cog's parent posts webhooks, and takes redirects, by itself; a proxy is the one place that sees
every address that it connects to. Its worker, which downloads weights, inherits its environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_NAMES = [name for lower in (*_PROXIES, "no_proxy") for name in (lower, lower.upper())]
_SAVED = "COG_TRITON_SAVED_PROXIES"


def has_proxy(environment: Mapping[str, str]) -> bool:
    """Whether the user's environment names a proxy, which then decides what may be reached."""
    return any(environment.get(name) for lower in _PROXIES for name in (lower, lower.upper()))


def with_proxy(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """`environment` with the proxy on `port` of this machine for everything; see `restore`."""
    saved = {name: environment[name] for name in _NAMES if name in environment}
    kept = {name: value for name, value in environment.items() if name not in saved}
    proxy = f"http://127.0.0.1:{port}"
    return {
        **kept,
        **{name: proxy for lower in _PROXIES[:2] for name in (lower, lower.upper())},
        _SAVED: json.dumps(saved),
    }


def restore(environment: MutableMapping[str, str]) -> None:
    """Undo `with_proxy` in place; a no-op without it."""
    saved = environment.pop(_SAVED, None)
    if saved is None:
        return
    for name in _NAMES:
        environment.pop(name, None)
    environment.update(json.loads(saved))
