"""Child process that makes the driver's checkpoint calls, which can block for ever.

Run as ``python -m cog_triton.keeper.checkpoint_child`` by `checkpoint_process`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from cog_triton.errors import CogTritonError
from cog_triton.ipc import child
from cog_triton.keeper.cuda_checkpoint import CudaCheckpoint
from cog_triton.keeper.process_checkpoint import (
    checkpoint_group,
    cuda_processes,
    restore_group,
)

DONE, FAILED = b"D", b"E"


def _answer(request: memoryview, cuda: CudaCheckpoint | CogTritonError) -> tuple[bytes, bytes]:
    call, pids = json.loads(bytes(request))
    calls: dict[str, Callable[[CudaCheckpoint, Sequence[int]], object]] = {
        "states": cuda_processes,
        "checkpoint": checkpoint_group,
        "restore": restore_group,
    }
    try:
        if isinstance(cuda, CogTritonError):
            raise cuda
        return DONE, json.dumps(calls[call](cuda, pids)).encode()
    except CogTritonError as error:
        return FAILED, str(error).encode()


def main() -> None:
    """Answer requests until the parent hangs up; its first argument is the descriptor."""
    cuda: CudaCheckpoint | CogTritonError
    try:
        cuda = CudaCheckpoint()
    except CogTritonError as error:
        cuda = error
    child.serve(int(sys.argv[1]), lambda request: _answer(request, cuda))


if __name__ == "__main__":
    main()
