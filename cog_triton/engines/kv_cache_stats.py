"""KV cache statistics of an engine, and their names on Triton's metrics port.

Block counts have TensorRT-LLM's metric name, so that all families are read alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
BLOCK_TYPE = "kv_cache_block_type"
PREFIX_QUERIES = "cog_triton_prefix_cache_queries_total"
PREFIX_HITS = "cog_triton_prefix_cache_hits_total"

_SAMPLE = re.compile(
    rf"^({BLOCKS}|{PREFIX_QUERIES}|{PREFIX_HITS})"
    rf'\{{(?=[^}}]*\bmodel="tensorrt_llm")(?:[^}}]*\b{BLOCK_TYPE}="(\w+)")?[^}}]*\}} (\S+)',
    re.M,
)


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """KV cache statistics; None is what an engine does not tell.

    `usage` is the used share of `blocks` of `block_size` tokens, from 0 to 1. `prefix_queries` and
    `prefix_hits` count prompt tokens since the start: all, and those that were found in the cache.
    """

    usage: float
    block_size: int | None = None
    blocks: int | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None

    def block_metrics(self) -> dict[str, float]:
        """Values of the gauge `BLOCKS` by `BLOCK_TYPE`."""
        values = {"fraction": self.usage}
        if self.block_size is not None:
            values["tokens_per"] = self.block_size
        if self.blocks is not None:
            used = round(self.usage * self.blocks)
            values |= {"max": self.blocks, "used": used, "free": self.blocks - used}
        return values

    @classmethod
    def of_engines(cls, engines: Sequence[Self]) -> Self | None:
        """Statistics of several engines of one model, as of one; None of none."""
        if not engines:
            return None
        blocks = _sum([one.blocks for one in engines])
        weights = [one.blocks or 0 for one in engines] if blocks else [1] * len(engines)
        used = sum(one.usage * weight for one, weight in zip(engines, weights, strict=True))
        return cls(
            used / sum(weights),
            engines[0].block_size,
            blocks,
            _sum([one.prefix_queries for one in engines]),
            _sum([one.prefix_hits for one in engines]),
        )

    def after(self, before: Self | None) -> Self:
        """These, with counters that continue those of an engine that has died."""
        if before is None:
            return self
        queries = _sum([self.prefix_queries, before.prefix_queries])
        hits = _sum([self.prefix_hits, before.prefix_hits])
        return type(self)(self.usage, self.block_size, self.blocks, queries, hits)

    @classmethod
    def from_metrics(cls, text: str) -> Self | None:
        """Read the statistics of the model ``tensorrt_llm`` in Triton's metrics; None: it has none.

        TensorRT-LLM counts hits in blocks, as the type "reused".
        """
        found = {(name, kind): float(value) for name, kind, value in _SAMPLE.findall(text)}
        blocks, size = found.get((BLOCKS, "max")), found.get((BLOCKS, "tokens_per"))
        used, usage = found.get((BLOCKS, "used")), found.get((BLOCKS, "fraction"))
        if usage is None:  # old releases
            if used is None or not blocks:
                return None
            usage = used / blocks
        hits, reused = found.get((PREFIX_HITS, "")), found.get((BLOCKS, "reused"))
        if hits is None and reused is not None and size is not None:
            hits = reused * size
        return cls(
            usage, _int(size), _int(blocks), _int(found.get((PREFIX_QUERIES, ""))), _int(hits)
        )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)
