"""MPI_COMM_WORLD by the C symbols of Open MPI; interfaces: MPI 3.1."""

from __future__ import annotations

import ctypes
import time


class World:
    """MPI_COMM_WORLD of this process."""

    def __init__(self) -> None:
        self._mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
        self._mpi.MPI_Init(None, None)
        world = ctypes.c_char.in_dll(self._mpi, "ompi_mpi_comm_world")
        self._world = ctypes.c_void_p(ctypes.addressof(world))
        self.rank = self._number("MPI_Comm_rank")
        self.size = self._number("MPI_Comm_size")

    def _number(self, call: str) -> int:
        value = ctypes.c_int(-1)
        assert self._mpi[call](self._world, ctypes.byref(value)) == 0
        return value.value

    def meet(self) -> None:
        """Wait for all ranks; a barrier that sleeps, as MPI_Barrier would burn a core."""
        request, done = ctypes.c_void_p(), ctypes.c_int()
        assert self._mpi.MPI_Ibarrier(self._world, ctypes.byref(request)) == 0
        while not done.value:
            assert self._mpi.MPI_Test(ctypes.byref(request), ctypes.byref(done), None) == 0
            time.sleep(0.02)

    def leave(self) -> None:
        """Take part in the ranks' common end."""
        self._mpi.MPI_Finalize()
