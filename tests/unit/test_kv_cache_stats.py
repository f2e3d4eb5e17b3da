"""KV cache statistics as they are written to Triton's metrics, and read from them."""

from __future__ import annotations

from cog_triton.engines.kv_cache_stats import BLOCKS, PREFIX_HITS, PREFIX_QUERIES, KVCacheStats

# As TensorRT-LLM's backend writes them; the second model is one beside it.
TENSORRT_LLM = """\
# HELP nv_trt_llm_kv_cache_block_metrics TRT LLM KV cache block metrics
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="other",version="1"} 1
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 1560
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 4680
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6240
"""  # noqa: E501
REUSED = f'{BLOCKS}{{kv_cache_block_type="reused",model="tensorrt_llm",version="1"}} 1e3\n'


def text_of(stats: KVCacheStats) -> str:
    lines = [
        f'{BLOCKS}{{version="1",model="tensorrt_llm",kv_cache_block_type="{name}"}} {value}'
        for name, value in stats.block_metrics().items()
    ]
    counts = {PREFIX_QUERIES: stats.prefix_queries, PREFIX_HITS: stats.prefix_hits}
    lines += [
        f'{name}{{model="tensorrt_llm",version="1"}} {count}'
        for name, count in counts.items()
        if count is not None
    ]
    return "\n".join(lines)


def test_what_is_written_is_read_again() -> None:
    for stats in (
        KVCacheStats(0.5),
        KVCacheStats(0.0, 32),
        KVCacheStats(1 / 3, 16, 1024),
        KVCacheStats(1.0, 16, 1024, 0, 0),
        KVCacheStats(0.125, 16, 1024, 700, 320),
    ):
        assert KVCacheStats.from_metrics(text_of(stats)) == stats


def test_blocks_are_used_or_free() -> None:
    values = KVCacheStats(0.2501, 64, 6240).block_metrics()
    assert (values["max"], values["used"], values["free"]) == (6240, 1561, 4679)


def test_tensorrt_llm_metrics_are_read() -> None:
    assert KVCacheStats.from_metrics(TENSORRT_LLM) == KVCacheStats(0.25, 64, 6240)
    reuses = KVCacheStats.from_metrics(TENSORRT_LLM + REUSED)
    assert reuses == KVCacheStats(0.25, 64, 6240, None, 64_000)


def test_releases_without_a_fraction_have_used_blocks() -> None:
    lines = [line for line in TENSORRT_LLM.splitlines() if "fraction" not in line]
    assert KVCacheStats.from_metrics("\n".join(lines)) == KVCacheStats(0.25, 64, 6240)


def test_a_server_without_such_metrics_has_no_statistics() -> None:
    assert KVCacheStats.from_metrics("") is None
    assert KVCacheStats.from_metrics('nv_inference_count{model="tensorrt_llm"} 3\n') is None
    assert KVCacheStats.from_metrics(TENSORRT_LLM.replace('"tensorrt_llm"', '"x"')) is None


def test_counters_continue_those_of_an_engine_that_has_died() -> None:
    before, now = KVCacheStats(0.5, 16, 8, 100, 40), KVCacheStats(0.1, 16, 8, 5, 1)
    assert now.after(None) == now
    assert now.after(before) == KVCacheStats(0.1, 16, 8, 105, 41)
