"""Paths for Triton, whose Python backend starts its stubs through a shell without quoting them."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from cog_triton.errors import InvalidArgument

_SAFE = re.compile(r"[\w/.+,:@%=^-]+")
_SHM = Path("/dev/shm")


def shell_safe(path: Path, shm_prefix: str, hosts: str = "") -> Path:
    """`path` itself if a shell takes it as one word, else a link to it, which goes with the server.

    Names in /dev/shm that begin with `shm_prefix` are removed when the server has ended.

    Raises:
        InvalidArgument: ranks run on other machines, `hosts`, which have no such link.
    """
    if _SAFE.fullmatch(str(path)):
        return path
    if hosts:
        raise InvalidArgument(
            f"{str(path)!r}: with MPI_HOSTS={hosts!r} it must be of letters, digits and"
            " / . + , : @ % = ^ _ -; set COG_TRITON_WORK_DIR to another directory"
        )
    link = _SHM / f"{shm_prefix}{secrets.token_hex(3)}"
    link.symlink_to(path, target_is_directory=True)
    return link
