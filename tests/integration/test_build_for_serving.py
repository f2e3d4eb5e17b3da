"""Builds that say how their engine is served, from config to tar to what Triton is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from build_runs import BuildRuns, build_step, gpt, llama, packed
from lora_adapters import adapter
from stack import Stack
from tensorrt_llm_tree import backends

from cog_triton.artifact.engine_tar import unpack
from cog_triton.artifact.lora_adapter import read_adapter
from cog_triton.engines.tensorrt_llm.adapter_tensors import to_tensors
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.triton.model_repository import read_config, render_repository
from cog_triton.triton.serve_config import ServeConfig

pytestmark = [pytest.mark.integration, pytest.mark.full]

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
    assert "[build] already done" in said_again, "no step is run for it"
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
    wrong = {"enable_chunked_context": True, "kv_cache_free_gpu_mem_fraction": 0.5}
    error = build_runs.refused({**gpt(use_paged_context_fmha="disable"), "runtime": wrong})
    refused = "runtime.enable_chunked_context: True: needs an engine built with a paged KV cache"
    assert error.startswith(f"E1300 BuildConfigInvalid: {refused}")


def with_adapters(**sources: Any) -> dict[str, Any]:
    """A Llama that takes adapters of two modules, of rank 8 at most."""
    lora = {
        "lora_plugin": "auto",
        "lora_target_modules": ["attn_q", "mlp_gate"],
        "max_lora_rank": 8,
    }
    config = llama()
    del config["quantize"]
    build = build_step("checkpoint", **lora)
    return {**config, "build": build, "lora_adapters": sources}


def served(build_runs: BuildRuns, **environment: str) -> Stack:
    """``cog-triton serve`` of what was built, on the real Triton with a look-alike backend."""
    directory = build_runs.directory
    return Stack(
        directory / "served",
        str(directory / "engine.tar"),
        TRITONSERVER_BACKEND_DIR=str(backends(directory / "backends")),
        TENSORRT_LLM_SEEN=str(directory / "seen"),
        COG_TRITON_SKIP_PREFLIGHT="true",
        **environment,
    )


def seen_by(build_runs: BuildRuns) -> list[dict[str, Any]]:
    """The requests that the look-alike backend got, as tensors by name."""
    return [json.loads(line) for line in (build_runs.directory / "seen").read_text().splitlines()]


def complete(stack: Stack, prompt: str, **values: Any) -> httpx.Response:
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 5, **values}
    return httpx.post(f"{stack.own}/v1/completions", json=body, timeout=60)


def test_adapters_are_packed_and_served_by_name(build_runs: BuildRuns) -> None:
    directory = build_runs.directory
    sql = adapter(directory / "adapters" / "sql", 4, modules=["self_attn.q_proj"], layers=2)
    sizes = {"mlp.up_proj": (48, 16)}
    up = adapter(directory / "up", 8, modules=["mlp.up_proj"], sizes=sizes, seed=1)
    tar = packed(up, directory / "up.tar")
    config = with_adapters(sql="adapters/sql", up=tar.as_uri())
    config["runtime"] = {"lora_cache_max_adapter_size": 8, "kv_cache_free_gpu_mem_fraction": 0.6}
    said = build_runs.build(config)
    told = "[lora] sql: rank 4 of q_proj; it was trained on 'org/base'"
    assert said.index(told) < said.index("[build] [TensorRT-LLM] TensorRT-LLM version: 1.2.1")
    shown = json.loads(build_runs.run("inspect", "--json", "engine.tar").stdout)
    assert shown["lora_adapters"]["sql"] == {
        "source": "adapters/sql",
        "revision": None,
        "rank": 4,
        "base_model": "org/base",
    }
    with served(build_runs).served() as stack:
        models = httpx.get(f"{stack.own}/v1/models").json()["data"]
        assert {each["id"] for each in models} == {"tiny-llama", "sql", "up"}
        for model in ("sql", "sql", "up"):
            answer = complete(stack, "hello", model=model)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == "hello"
        assert complete(stack, "hello").status_code == 200
        config_of = httpx.get(f"{stack.triton}/v2/models/tensorrt_llm/config").json()["parameters"]
        assert config_of["lora_cache_max_adapter_size"]["string_value"] == "8"
        assert config_of["kv_cache_free_gpu_mem_fraction"]["string_value"] == "0.6"
    tasks = [each for each in seen_by(build_runs) if "lora_task_id" in each]
    loads = [each for each in tasks if "lora_weights" in each]
    assert len({each["lora_task_id"][0] for each in loads}) == 2, "weights on first use alone"
    assert len(tasks) - len(loads) >= 3, "and then the id"
    for source, load in zip((sql, up), loads, strict=False):
        for name, expected in to_tensors(read_adapter(source)).items():
            assert np.array_equal(np.array(load[name], expected.dtype), expected.ravel())
            assert load["shapes"][name] == list(expected.shape)


def test_an_adapter_that_does_not_fit_ends_the_build_before_a_step(build_runs: BuildRuns) -> None:
    adapter(build_runs.directory / "sql", 16)
    config = with_adapters(sql="./sql")
    error = build_runs.refused(config)
    assert error.startswith("E1305 EngineIncompatible: lora_adapters.sql: ")
    assert "rank 16; the engine takes at most 8" in error
    assert not build_runs.steps("checkpoint")
    checked = build_runs.run("build", "--check", build_runs.config(config))
    assert (checked.returncode, "rank 16" in checked.stderr) == (1, True)
    adapter(build_runs.directory / "sql", 8)
    shown = build_runs.run("build", "--check", "--plan", build_runs.config(config)).stdout
    assert "[check] lora_adapters: sql: rank 8 of q_proj; it was trained on 'org/base'" in shown
    assert "lora      sql: ./sql" in shown
