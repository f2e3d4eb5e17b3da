"""Demand of an engine: weights against the memory of the GPUs here, before anything is loaded.

Only weights that cannot fit are refused. The room for the KV cache is an estimate, which is shown.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cog_triton.errors import EngineIncompatible
from cog_triton.sizing import fit, gpu_table
from cog_triton.sizing.memory_sum import GIB, Precision, memory_sum
from cog_triton.sizing.model_files import ModelFiles

_log = logging.getLogger(__name__)
_CERTAIN = 0.95  # of the weights; a model's files may have parts that are not loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What an engine asks of each of its `gpus`.

    `share` is the most of a GPU's memory that it takes, by the setting `utilization`, if any.
    """

    files: ModelFiles
    gpus: int
    precision: Precision
    share: float = 1.0
    utilization: str | None = None

    def require(self, *, skip: bool, alone: bool) -> None:
        """Compare the engine with the GPUs here, and log what fits.

        Args:
            skip: whether an engine that does not fit is served with a warning.
            alone: whether no other engine of this server can have memory of the GPU, as a spare
                does; else only the GPU's whole memory can refuse.

        Raises:
            EngineIncompatible: its weights do not fit; with the numbers and what to set.
        """
        try:
            here = gpu_table.gpus_here()[: self.gpus]
            if not here or len({(one.name, one.memory) for one in here}) > 1:
                why = "several kinds" if here else "no GPU"
                _log.info("memory of the GPU: not compared: %s", why)
                return
            gpu = min(here, key=lambda one: one.memory if one.free is None else one.free)
            _log.info("%s", self._compared(gpu, alone=alone))
        except EngineIncompatible as error:
            if not skip:
                raise
            _log.warning("COG_TRITON_SKIP_PREFLIGHT is set, so this is served: %s", error)

    def _compared(self, gpu: gpu_table.Gpu, *, alone: bool) -> str:
        """A line that says what fits; raises as `require`."""
        files = self.files
        one = memory_sum(
            files.shape, files.weight_bytes, gpu, self.gpus, self.precision, self.share
        )
        where = f"{files.name} on {self.gpus} x {gpu.name}"
        if one.weights * _CERTAIN > (one.usable if alone else int(gpu.memory * self.share)):
            others = gpu.memory - (gpu.memory if gpu.free is None else gpu.free)
            raise EngineIncompatible(
                f"{where}: {one.weights / GIB:.1f} GiB of weights on each, and the engine may take"
                f" {one.usable / GIB:.1f} of its {gpu.memory / GIB:.1f} GiB ({others / GIB:.1f} are"
                f" others'): {self._advice(one.weights, others, gpu)}"
            )
        return (
            f"{where}: by an estimate {one.kv_cache / GIB:.1f} GiB are left for the KV cache,"
            f" {one.kv_tokens} tokens"
        )

    def _advice(self, weights: int, others: int, gpu: gpu_table.Gpu) -> str:
        """What to set or to end so that `weights` fit."""
        if weights + 0.08 * gpu.memory < gpu.memory - others and self.utilization:
            return f"set {self.utilization} to {weights / gpu.memory + 0.04:.2f}"
        if weights < gpu.memory * self.share:
            return "end the other programs on the GPU"
        more = "tensor_parallel_size in model.json to more GPUs, or " if self.utilization else ""
        return f"set {more}a smaller or quantized model. {fit.would_do(self.files)}"
