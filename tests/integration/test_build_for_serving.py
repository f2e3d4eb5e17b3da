"""Builds that say how their engine is served, from config to tar to what Triton is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from build_runs import BuildRuns, gpt

from cog_triton.artifact.engine_tar import unpack
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.triton.model_repository import read_config, render_repository
from cog_triton.triton.serve_config import ServeConfig

pytestmark = pytest.mark.integration

RUNTIME: dict[str, Any] = {
    "kv_cache_free_gpu_mem_fraction": 0.6,
    "kv_cache_host_memory_bytes": 4096,
    "batch_scheduler_policy": "max_utilization",
}


def rendered(directory: Path, tar: Path, **arguments: Any) -> dict[str, str]:
    """Parameters of Triton's engine model, for the engine in `tar`."""
    unpack(tar, directory / "unpacked")
    family = TensorRTLLMFamily.open(directory / "unpacked")
    serve = ServeConfig({"tensorrt_llm": arguments})
    target = render_repository(family, serve, directory / "repo")
    config = read_config(target / "tensorrt_llm" / "config.pbtxt")
    return {name: value.string_value for name, value in config.parameters.items()}


def test_runtime_settings_are_packed_shown_and_served_with(build_runs: BuildRuns) -> None:
    build_runs.build({**gpt(), "runtime": RUNTIME})
    shown = build_runs.run("inspect", "--json", "engine.tar")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["runtime"] == RUNTIME
    table = build_runs.run("inspect", "engine.tar").stdout
    assert "kv_cache_free_gpu_mem_fraction 0.6" in table
    tar = build_runs.directory / "engine.tar"
    said = rendered(build_runs.directory, tar, kv_cache_free_gpu_mem_fraction=0.5)
    assert said["kv_cache_free_gpu_mem_fraction"] == "0.5", "the serve config's"
    assert said["batch_scheduler_policy"] == "max_utilization"
    assert said["kv_cache_host_memory_bytes"] == "4096"

    said_again = build_runs.build({**gpt(), "runtime": {"enable_chunked_context": True}})
    assert "[build] already done by another build" in said_again, "no step is run for it"
    build_runs.build(gpt())
    shown = build_runs.run("inspect", "--json", "engine.tar")
    assert json.loads(shown.stdout)["runtime"] == {}
    manifest = json.loads((unpacked(build_runs) / "cog-triton.json").read_text())
    assert manifest["schema"] == 1, "earlier versions read it"


def unpacked(build_runs: BuildRuns) -> Path:
    target = build_runs.directory / "unpacked"
    unpack(build_runs.directory / "engine.tar", target)
    return target


def test_what_the_engine_cannot_do_is_refused_before_it_is_packed(build_runs: BuildRuns) -> None:
    wrong = {"lora_cache_max_adapter_size": 8, "kv_cache_host_memory_bytes": 1 << 20}
    error = build_runs.refused({**gpt(use_paged_context_fmha="disable"), "runtime": wrong})
    assert error.startswith("E1300 BuildConfigInvalid: runtime.")
    assert "runtime.lora_cache_max_adapter_size: 8: needs an engine built with lora_plugin" in error
    assert "runtime.kv_cache_host_memory_bytes: 1048576: needs enable_kv_cache_reuse true" in error
