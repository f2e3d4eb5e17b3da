"""Runtime settings that an engine carries: read, checked, and kept below the server's own."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import sample_engines
import tensorrt_llm_engines
from tensorrt_llm_engines import V1, parameters, render

from cog_triton.builder.config import parse_config
from cog_triton.engines.tensorrt_llm import runtime_settings
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.errors import (
    BuildConfigInvalid,
    EngineCorrupt,
    EngineIncompatible,
    InvalidPredictorConfig,
)
from cog_triton.system.host_memory import HostMemory

CARRIED = {
    "kv_cache_free_gpu_mem_fraction": 0.7,
    "kv_cache_host_memory_bytes": 1 << 20,
    "enable_chunked_context": True,
    "batch_scheduler_policy": "max_utilization",
}
CONFIG = """
model_id: m
example_name: {family}
runtime: {runtime}
build: {{executable: trtllm-build, output_dir: engine}}
"""


def opened(directory: Path, runtime: dict[str, Any], **changes: Any) -> TensorRTLLMFamily:
    path = tensorrt_llm_engines.make(directory / "engine", V1, **changes)
    sample_engines.with_manifest(path, schema=2, runtime=runtime)
    return TensorRTLLMFamily.open(path)


def rendered(
    directory: Path, family: TensorRTLLMFamily, arguments: dict[str, Any] | None = None
) -> dict[str, str]:
    configs = render(family, directory / "repo", {"tensorrt_llm": arguments or {}})
    return parameters(configs["tensorrt_llm"])


def test_an_engine_is_served_with_what_it_carries(tmp_path: Path) -> None:
    family = opened(tmp_path, CARRIED, build_config__max_num_tokens=512)
    said = rendered(tmp_path, family)
    assert said["kv_cache_free_gpu_mem_fraction"] == "0.7"
    assert said["kv_cache_host_memory_bytes"] == str(1 << 20)
    assert said["enable_chunked_context"] == "true"
    assert said["batch_scheduler_policy"] == "max_utilization"
    assert family.limits.max_input_len == 8191, "chunked context takes longer prompts"


def test_a_serve_config_goes_before_it(tmp_path: Path) -> None:
    given = {"kv_cache_free_gpu_mem_fraction": 0.95, "enable_chunked_context": ""}
    said = rendered(tmp_path, opened(tmp_path, CARRIED), given)
    assert said["kv_cache_free_gpu_mem_fraction"] == "0.95"
    assert said["enable_chunked_context"] == "true", "a key without a value is not set"


def test_no_engine_takes_all_host_memory_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime_settings, "host_memory", lambda: HostMemory(4000, ""))
    carried = {"kv_cache_host_memory_bytes": 1 << 40}
    with caplog.at_level(logging.WARNING):
        said = rendered(tmp_path, opened(tmp_path, carried))
    assert said["kv_cache_host_memory_bytes"] == "1000"
    assert "kv_cache_host_memory_bytes=1099511627776 is lowered to 1000" in caplog.text
    again = opened(tmp_path / "2", carried)
    said = rendered(tmp_path, again, {"kv_cache_host_memory_bytes": 5000})
    assert said["kv_cache_host_memory_bytes"] == "5000", "the operator's own is as it is"


@pytest.mark.parametrize(
    ("runtime", "says"),
    [
        ({"engine_dir": "/etc"}, "runtime.engine_dir='/etc': unknown setting"),
        ({"lora_prefetch_dir": "/etc"}, "runtime.lora_prefetch_dir='/etc': unknown setting"),
        ({"max_queue_size": 9}, "runtime.max_queue_size=9: unknown setting"),
        ({"kv_cache_host_memory_byte": 9}, "did you mean 'kv_cache_host_memory_bytes'"),
        ({"kv_cache_free_gpu_mem_fraction": 0.91}, "=0.91: must be less than or equal to 0.9"),
        ({"kv_cache_host_memory_bytes": -1}, "=-1: must be greater than or equal to 0"),
        ({"batch_scheduler_policy": "x"}, "must be guaranteed_no_evict or max_utilization"),
        ({"lookahead_ngram_size": True}, "must be a valid integer"),
    ],
)
def test_a_manifest_with_other_settings_is_refused(
    runtime: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineCorrupt) as caught:
        opened(tmp_path, runtime)
    assert says in caught.value.detail
    assert "cog-triton.json: runtime." in caught.value.detail
    with pytest.raises(BuildConfigInvalid) as refused:
        parse_config(CONFIG.format(family="llama", runtime=runtime), "c.yaml")
    assert f"runtime.{next(iter(runtime))}: " in refused.value.detail


def test_what_this_engine_cannot_do_is_refused_as_its_own(tmp_path: Path) -> None:
    paged = {"build_config__plugin_config__use_paged_context_fmha": False}
    family = opened(tmp_path, {"enable_chunked_context": True}, **paged)
    with pytest.raises(
        InvalidPredictorConfig, match=r"chunked_context=True: .*; it is one that the engin"
    ):
        rendered(tmp_path, family)
    with pytest.raises(InvalidPredictorConfig) as caught:
        rendered(tmp_path, family, {"enable_chunked_context": "True"})
    assert "engine carries" not in caught.value.detail


def test_an_engine_with_a_draft_beside_it_is_refused(tmp_path: Path) -> None:
    path = sample_engines.with_manifest(tensorrt_llm_engines.make(tmp_path / "engine", V1))
    manifest = json.loads((path / "cog-triton.json").read_text("utf-8"))
    draft = {"model_id": "small", "revision": None, "num_draft_tokens": 3}
    (path / "cog-triton.json").write_text(json.dumps({**manifest, "schema": 2, "draft": draft}))
    with pytest.raises(EngineIncompatible, match=r"draft: .* serve its model by vLLM"):
        TensorRTLLMFamily.open(path)
