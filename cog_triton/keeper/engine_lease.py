"""Lease of an engine process, as Triton's stubs have it from the engine keeper."""

from __future__ import annotations

import os
from contextlib import suppress

from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.ipc.connection import Connection
from cog_triton.keeper.keeper_messages import (
    KEEPER_VARIABLE,
    REPLICAS_VARIABLE,
    EngineSpec,
    Leased,
    LeaseRefused,
    LeaseRequest,
    Locate,
    Release,
)


def keeper_name() -> str:
    """Name of the keeper's socket; raises E2105 in a Triton that was started without a keeper."""
    name = os.environ.get(KEEPER_VARIABLE)
    if not name:
        raise TritonUnavailable(
            f"{KEEPER_VARIABLE} is not set: this engine needs the engine keeper, which"
            " `cog-triton serve` starts beside tritonserver on the same machine"
        )
    return name


def replica_count() -> int:
    """Number of engines that the stubs of this Triton lease."""
    return int(os.environ.get(REPLICAS_VARIABLE) or 1)


class EngineLease:
    """Lease of one engine process at a time, of one stub."""

    def __init__(self, keeper: str, spec: EngineSpec, owner: int = 0, replica: int = 0) -> None:
        """`owner` is the process id of the stub's tritonserver, killed when the stub dies."""
        self._request = LeaseRequest(spec, owner, replica)
        self._connection = Connection.to(keeper)

    def obtain(self) -> str:
        """Wait for an engine, in place of the last one, which is lost; returns its address.

        Raises the engine's coded error when it does not load, RuntimeError when there is none, and
        EOFError or OSError when the keeper is gone.
        """
        self._connection.send(self._request)
        answer = self._connection.receive()
        if isinstance(answer, LeaseRefused):
            if isinstance(answer.error, CogTritonError):
                raise answer.error
            raise RuntimeError(answer.error)
        assert isinstance(answer, Leased)
        assert answer.address is not None
        return answer.address

    def release(self) -> None:
        """End the lease; another thread's `obtain` fails."""
        with suppress(OSError):
            self._connection.send(Release())
        self._connection.close()


def locate_engine(keeper: str, owner: int, replica: int = 0) -> str:
    """Address of the engine leased as `replica` to the tritonserver `owner`, for its other stubs.

    Waits for a moment; raises OSError or EOFError where there is none yet.
    """
    with Connection.to(keeper) as connection:
        connection.send(Locate(owner, replica))
        answer = connection.receive()
    if answer.address is None:
        raise ConnectionRefusedError("no engine is leased yet")
    return str(answer.address)
