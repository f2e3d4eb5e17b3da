"""Names that 0.4.0 had and this release lacks: each is refused, with what to use instead.

A row stays for one minor release.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from cog_triton.errors import InvalidArgument

_UNSET = ("", "0", "false", "f", "no", "n", "off", "127.0.0.1")
_GRPC = (
    "gRPC is on 127.0.0.1, as neither key nor limits protected it; unset it, and use Triton's HTTP"
    " port, or forward the gRPC port yourself (ssh -L)"
)
_PARK = "no engine outlives its server; SPARE_ENGINE=1 has a second engine take over (parking.md)"
REMOVED = {
    **dict.fromkeys(("TRITON_GRPC_PUBLIC", "TRITON_GRPC_HOST"), _GRPC),
    **dict.fromkeys(("PARK_ENGINE", "cog-triton park", "cog-triton serve --park"), _PARK),
}
"""What to use instead of each name: an environment variable, a command, a command's option
(``cog-triton serve --swap``), a file of a model, or a key or value of a config."""


def removed(name: str, value: object = None) -> InvalidArgument:
    """E1005 for a name of the table, with the value it was given, if any."""
    given = "" if value is None else f"={value!r}"
    return InvalidArgument(f"{name}{given} was removed: {REMOVED[name]}")


def check_environment() -> None:
    """Raise E1005 for a removed environment variable that is set to more than off."""
    for name in REMOVED.keys() & os.environ.keys():
        if (value := os.environ[name]).lower() not in _UNSET:
            raise removed(name, value)


def check_keys(keys: Iterable[str]) -> None:
    """Raise E1005 for the first removed one of a config's keys or values."""
    for key in keys:
        if key in REMOVED:
            raise removed(key)


def check_arguments(arguments: list[str]) -> None:
    """Raise E1005 for a removed command, or a removed option of the command that is first."""
    command = f"cog-triton {arguments[0]}"
    check_keys([command])
    for argument in arguments[1:]:
        if argument == "--":
            return
        check_keys([f"{command} {argument.partition('=')[0].replace('_', '-')}"])
