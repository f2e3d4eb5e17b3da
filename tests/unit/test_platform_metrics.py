"""Model server metrics as platforms read them, and Triton's metrics that they come from."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

import pytest
from http_replies import reply, serving
from prometheus_client import CollectorRegistry, generate_latest

from cog_triton.engines.kv_cache_stats import BLOCKS, KVCacheStats
from cog_triton.errors import TritonUnavailable
from cog_triton.serving.telemetry import platform_metrics
from cog_triton.serving.telemetry.platform_metrics import PlatformMetrics, TritonMetrics
from cog_triton.system.ports import free_ports

LABELS = 'engine="0",model_name="a model"'
HALF = f'{BLOCKS}{{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"}} 0.5\n'


def text(kv_cache: KVCacheStats | None) -> str:
    registry = CollectorRegistry()
    registry.register(PlatformMetrics("a model", lambda: 3, lambda: 5, lambda: kv_cache))
    return generate_latest(registry).decode()


def samples(kv_cache: KVCacheStats | None) -> list[str]:
    return [line for line in text(kv_cache).splitlines() if not line.startswith("#")]


def test_names_and_labels_are_those_of_vllm() -> None:
    """The names that the endpoint picker of llm-d reads by default."""
    assert samples(KVCacheStats(0.25, 16, 1024, 700, 320)) == [
        f"vllm:num_requests_running{{{LABELS}}} 3.0",
        f"vllm:num_requests_waiting{{{LABELS}}} 5.0",
        "cog_triton_kv_cache_usage_ratio 0.25",
        f"vllm:kv_cache_usage_perc{{{LABELS}}} 0.25",
        f'vllm:cache_config_info{{block_size="16",{LABELS},num_gpu_blocks="1024"}} 1.0',
        "cog_triton_prefix_cache_queries_total 700.0",
        f"vllm:prefix_cache_queries_total{{{LABELS}}} 700.0",
        "cog_triton_prefix_cache_hits_total 320.0",
        f"vllm:prefix_cache_hits_total{{{LABELS}}} 320.0",
    ]


def test_types_are_those_of_the_protocol() -> None:
    lines = text(KVCacheStats(0.25, 16, 1024, 700, 320)).splitlines()
    types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    assert {kind for name, kind in types.items() if not name.endswith("_total")} == {"gauge"}
    assert types["vllm:prefix_cache_hits_total"] == "counter"


def test_what_an_engine_does_not_tell_is_left_out() -> None:
    running, waiting, *rest = samples(KVCacheStats(0.5, 32))
    assert rest == [
        "cog_triton_kv_cache_usage_ratio 0.5",
        f"vllm:kv_cache_usage_perc{{{LABELS}}} 0.5",
        f'vllm:cache_config_info{{block_size="32",{LABELS}}} 1.0',
    ]
    assert samples(None) == [running, waiting]


def client(url: str) -> TritonMetrics:
    parts = urlsplit(url)
    return TritonMetrics(parts.hostname or "", parts.port or 0)


def test_triton_is_asked_once_for_scrapes_at_one_time() -> None:
    asked = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        reply(request, 200, HALF.encode())

    with serving(answer) as url:
        triton = client(url)
        for _ in range(5):
            assert triton.kv_cache() == KVCacheStats(0.5)
        assert asked[0] == "/metrics"
        assert len(asked) < 5


def test_without_triton_there_is_no_kv_cache() -> None:
    triton = TritonMetrics("127.0.0.1", *free_ports(1))
    assert triton.kv_cache() is None
    with pytest.raises(TritonUnavailable, match="Triton's metrics: ConnectionRefusedError"):
        triton.text()


def test_a_triton_that_hangs_is_not_asked_by_every_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_metrics, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(platform_metrics, "_ERROR_AGE_S", 1000)
    asked, came, goes_on = [], threading.Event(), threading.Event()

    def hang(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        came.set()
        goes_on.wait(60)

    with serving(hang) as url:
        triton = client(url)
        for _ in range(3):
            with pytest.raises(TritonUnavailable, match="TimeoutError"):
                triton.text()
        assert came.wait(60)
        assert len(asked) == 1
        goes_on.set()


def test_an_error_of_triton_is_no_metrics() -> None:
    with serving(lambda request: reply(request, 404)) as url:
        assert client(url).kv_cache() is None
