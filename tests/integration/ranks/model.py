"""The engine's model for several ranks: rank 0 serves, the others join and wait for its end.

As TensorRT-LLM's backend does, each rank calls MPI_Init, and only rank 0 comes back from its
initialization. Interfaces: MPI 3.1, by the C symbols of Open MPI.
"""

import ctypes
import time
from collections.abc import Mapping

from cog_triton.backend.leased_engine import LeasedEngine
from cog_triton.backend.token_model import make_token_model


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
        self._mpi.MPI_Finalize()


Served = make_token_model(
    LeasedEngine.opener("cog_triton.engines.openvino.engine:OpenVINOPipeline")
)


class TritonPythonModel(Served):
    def initialize(self, args: Mapping[str, str]) -> None:
        self._world = World()
        self._world.meet()
        print(f"rank {self._world.rank} of {self._world.size} has joined", flush=True)
        if self._world.rank == 0:
            super().initialize(args)
            return
        self._world.meet()
        self._world.leave()
        raise RuntimeError("the leader has shut down")

    def finalize(self) -> None:
        super().finalize()
        self._world.meet()
        self._world.leave()
