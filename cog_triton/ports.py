"""Whether ports can be listened on, before anything is started that would."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from cog_triton.errors import InvalidArgument

OPENAI_PORT = 8080
"""Where `cog-triton serve` has the OpenAI API, unless told otherwise."""


def require_free(ports: Mapping[str, tuple[str, int]]) -> None:
    """Raise E1005 unless every (address, port), by its setting's name, is free and no two equal."""
    taken: dict[int, str] = {}
    for name, (host, port) in ports.items():
        if port in taken:
            raise InvalidArgument(f"{name}={port}: is {taken[port]} too; must differ")
        taken[port] = name
        reason = refusal(host, port)
        if reason is not None:
            raise InvalidArgument(
                f"{name}={port}: cannot listen on {host}:{port}: {reason};"
                f" choose another with {name}=..."
            )


def refusal(host: str, port: int) -> str | None:
    """Why the system lets nobody listen there, None if it would."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return None
