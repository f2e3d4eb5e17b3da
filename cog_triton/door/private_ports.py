"""Loopback ports of the servers behind the door, and the environment that tells Cog of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from cog_triton.settings import Settings
from cog_triton.system.ports import reserve

_SECRETS = ("COG_TRITON_API_KEY", "OPENAI_API_KEY")
_LOOPBACK = "127.0.0.1"


class PrivatePorts:
    """A port for each of the settings `names`, kept from others until it is closed."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sockets: dict[str, socket.socket] = {name: reserve() for name in names}
        self.numbers = {name: found.getsockname()[1] for name, found in self._sockets.items()}

    def close(self) -> None:
        """Give the ports back."""
        for found in self._sockets.values():
            found.close()


def cog_environment(settings: Settings, private: Mapping[str, int]) -> dict[str, str]:
    """The environment of a Cog behind the door: it and what it starts listen on `private` ports.

    Keys stay in the door.
    """
    return {
        **{name: value for name, value in os.environ.items() if name not in _SECRETS},
        "COG_HOST": _LOOPBACK,
        "TRITON_HOST": _LOOPBACK,
        "COG_TRITON_KEY_AT_DOOR": "true" if settings.api_key else "false",
        **{name: str(port) for name, port in private.items()},
    }
