"""Fit of a model on GPUs: the fewest that hold it with room to serve, then the least loss.

`Demand` compares an engine with the GPUs here before anything is loaded: only weights that cannot
fit are refused, the room for the KV cache is an estimate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cog_triton.errors import EngineIncompatible
from cog_triton.sizing import gpu_table
from cog_triton.sizing.gpu_table import COUNTS, Gpu, known
from cog_triton.sizing.memory_sum import (
    AS_STORED,
    FP8,
    GIB,
    INT4_AWQ,
    INT8,
    MAX_NUM_TOKENS,
    MemorySum,
    Precision,
    memory_sum,
)
from cog_triton.sizing.model_files import ModelFiles

_log = logging.getLogger(__name__)
_CERTAIN = 0.95  # of the weights; a model's files may have parts that are not loaded
_ROOM = (16, 4)  # sequences in the KV cache at least: wanted, and where nothing has that
_USUAL_SEQUENCE = 4096
_BATCHES = (256, 128, 64, 32, 16, 8, 4)
_USUAL_TOKENS = 1024  # a running sequence's, for the batch size; the KV cache is paged


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model is served: memory, and the limits that follow from it.

    Attributes:
        max_seq_len: tokens of prompt and answer together.
        max_batch_size: sequences that run at once.
    """

    memory: MemorySum
    max_seq_len: int
    max_batch_size: int

    @property
    def max_input_len(self) -> int:
        """Tokens of a prompt: three quarters of a sequence, so that there is room to answer."""
        return self.max_seq_len * 3 // 4


def choose(
    files: ModelFiles, gpu: Gpu, counts: Sequence[int], precisions: Sequence[Precision]
) -> Fit:
    """The first fit: the first of `counts` of GPUs, and on it the first of `precisions`.

    All GPUs of a count work on every layer together (tensor parallelism). A precision whose loss
    is to be seen is taken only if no number of GPUs does without.

    Raises:
        EngineIncompatible: it does not fit; says what is short, and what would do.
    """
    sums = [
        memory_sum(files.shape, files.weight_bytes, gpu, count, precision)
        for count in counts
        if files.shape.heads % count == 0
        for precision in precisions
    ]
    if not sums:
        raise EngineIncompatible(
            f"{files.name}: {files.shape.heads} attention heads cannot be split over"
            f" {' or '.join(map(str, counts))} GPUs: the number must divide them"
        )
    for sequences in _ROOM:
        for one in sorted(sums, key=lambda one: one.precision.visible_loss):
            if (fit := _fit(files, one, sequences)) is not None:
                return fit
    best = max(sums, key=lambda one: one.kv_cache)
    least = _least_cache(files, best, _ROOM[-1])
    short = least - best.kv_cache
    hint = ""
    if best.kv_tokens:
        hint = f" A single sequence of {best.kv_tokens} tokens would: --max-model-len."
    if gpu.free is not None and best.usable == gpu.free:
        hint += f" Others hold {(gpu.memory - gpu.free) / GIB:.1f} GiB of it."
    raise EngineIncompatible(
        f"{files.name} does not fit {best.gpus} x {gpu.name} with {best.precision.title}:"
        f" {short / GIB:.1f} GiB short on each: {'; '.join(line.strip() for line in best.lines())}."
        f"{hint} {would_do(files)}"
    )


def would_do(files: ModelFiles) -> str:
    """Sentence: the smallest GPU of the table that holds the model alone, and several if none."""
    for count in (count for count in COUNTS if files.shape.heads % count == 0):
        for gpu in known():
            for precision in precisions_of(files, gpu):
                one = memory_sum(files.shape, files.weight_bytes, gpu, count, precision)
                if _fit(files, one, _ROOM[0]) is not None:
                    return f"It would fit {count} x {gpu.name} with {precision.title}"
    return f"No {COUNTS[-1]} GPUs of one kind hold it"


def precisions_of(files: ModelFiles, gpu: Gpu) -> list[Precision]:
    """Precisions to try on `gpu`, the least loss first; quantized weights are taken as they are."""
    if files.shape.quantized is not None:
        return [AS_STORED]
    return [AS_STORED, *([FP8] if gpu.has_fp8 else []), INT8, INT4_AWQ]


def _least_cache(files: ModelFiles, one: MemorySum, sequences: int) -> int:
    return sequences * min(_USUAL_SEQUENCE, files.shape.max_len) * one.kv_per_token


def _fit(files: ModelFiles, one: MemorySum, sequences: int) -> Fit | None:
    if one.kv_cache < _least_cache(files, one, sequences):
        return None
    length = min(files.shape.max_len, one.kv_tokens // 2, 4 * MAX_NUM_TOKENS)
    length = max(length // 256 * 256, min(length, 256))
    wanted = one.kv_tokens // min(_USUAL_TOKENS, length)
    batch = next((size for size in _BATCHES if size <= wanted), _BATCHES[-1])
    return Fit(one, length, batch)


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
            more = (
                f"raise {self.utilization}, or tensor_parallel_size, " if self.utilization else ""
            )
            raise EngineIncompatible(
                f"{where}: {one.weights / GIB:.1f} GiB of weights on each, and the engine may take"
                f" {one.usable / GIB:.1f} of its {gpu.memory / GIB:.1f} GiB ({others / GIB:.1f} are"
                f" others'): end the other programs on the GPU, {more}or take a smaller or"
                f" quantized model. {would_do(files)}"
            )
        return (
            f"{where}: by an estimate {one.kv_cache / GIB:.1f} GiB are left for the KV cache,"
            f" {one.kv_tokens} tokens"
        )
