"""The engine's model for several ranks: rank 0 serves, the others join and wait for its end.

As TensorRT-LLM's backend does, each rank calls MPI_Init, and only rank 0 comes back from its
initialization.
"""

from collections.abc import Mapping

from world import World

from cog_triton.backend import token_model


class TritonPythonModel(token_model.TritonPythonModel):
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
