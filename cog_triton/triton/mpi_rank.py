"""MPI rank wrapper: runs one tritonserver under mpirun so that its exit ends all ranks.

    python -S -I mpi_rank.py COMMAND... [--other-ranks COMMAND...]

The first command is rank 0's, the second the others', with their number for "{rank}": all are one
program to mpirun, as that of Open MPI 5.0.7 (Debian 13) crashes when it is given several.

mpirun lets the other ranks continue when one that never called MPI_Init exits with 0, and gives
them a second between SIGTERM and SIGKILL. So here an unrequested exit is a failure, whatever its
code; and SIGUSR1, which mpirun forwards to the ranks of all machines, requests a graceful stop:
rank 0 stops, and its engine tells the others to. Uses the standard library only.
Interfaces: mpirun(1) of Open MPI, prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

SHM_DIRECTORY = "OMPI_MCA_btl_vader_backing_directory"
"""Directory of Open MPI 4's shared memory, set so that leftovers of killed ranks are removed."""
OTHER_RANKS = "--other-ranks"
"""Word between the command of rank 0 and that of the others."""
RANK = "{rank}"
"""What stands for a rank's number in the command of the others."""
_PR_SET_PDEATHSIG = 1
_LEADER_TIMEOUT_S = 6  # of the other ranks: tritonserver's exit timeout plus one second


def command_of(words: list[str], rank: str) -> list[str]:
    """The command of `rank` among those given."""
    if OTHER_RANKS not in words:
        return words
    at = words.index(OTHER_RANKS)
    if rank == "0":
        return words[:at]
    return [word.replace(RANK, rank) for word in words[at + 1 :]]


def main(words: list[str]) -> int:
    """Run this rank's command; returns 0 after SIGUSR1, else its exit code, 128 + signal, or 1."""
    libc = ctypes.CDLL(None)
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK")
    if rank is None:
        sys.stderr.write("mpi_rank.py: no OMPI_COMM_WORLD_RANK: runs under Open MPI's mpirun\n")
        return 1
    command = command_of(words, rank)
    process: subprocess.Popen[bytes] | None = None
    asked = stopped = False

    def in_child() -> None:
        # mpirun signals our whole process group; SIGUSR1 is for this wrapper only.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked, stopped
        if number == signal.SIGUSR1:
            asked = True
            if rank != "0":
                signal.alarm(_LEADER_TIMEOUT_S)
                return
        stopped = True
        if process is not None:
            process.terminate()

    if SHM_DIRECTORY in os.environ:
        Path(os.environ[SHM_DIRECTORY]).mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, on_signal)
    process = subprocess.Popen(command, preexec_fn=in_child)
    if stopped:
        process.terminate()
    code = process.wait()
    code = code if code >= 0 else 128 - code
    if asked:
        return 0
    sys.stderr.write(f"rank {rank}: tritonserver exited with code {code}\n")
    return code or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
