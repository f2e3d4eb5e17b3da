"""Look-alike of TensorRT-LLM's Triton backend, with its ranks: the answer repeats the prompt.

As in the real one, each rank calls MPI_Init in its tritonserver, and only rank 0's serves.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ranks"))
from world import World

_STEP_S = 0.02


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._world = World()
        self._world.meet()
        node = os.environ["SLURMD_NODENAME"]
        print(f"rank {self._world.rank} of {self._world.size} is on {node}", flush=True)
        if self._world.rank:
            self._world.meet()
            self._world.leave()
            raise RuntimeError("the leader has shut down")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            sender = request.get_response_sender()
            threading.Thread(target=_answer, args=(sender, values), daemon=True).start()

    def finalize(self) -> None:
        self._world.meet()
        self._world.leave()


def _answer(sender: Any, values: dict[str, Any]) -> None:
    prompt = values["input_ids"].ravel()
    for place in range(int(values["request_output_len"].ravel()[0])):
        time.sleep(_STEP_S)
        token = prompt[place % len(prompt)]
        tensors = [
            pb_utils.Tensor("output_ids", np.array([[[token]]], dtype=np.int32)),
            pb_utils.Tensor("sequence_length", np.array([[1]], dtype=np.int32)),
        ]
        sender.send(pb_utils.InferenceResponse(output_tensors=tensors))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
