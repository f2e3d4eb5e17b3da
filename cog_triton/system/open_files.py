"""Limit of open files: the soft limit raised towards the hard one."""

from __future__ import annotations

import resource

# Some programs, mpirun's among them, close every descriptor up to the limit one by one.
_ENOUGH = 65536


def raise_soft_limit() -> int:
    """Raise the soft limit of this process and its future children; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
