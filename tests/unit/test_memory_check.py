"""Memory check of a start: the real command line under a fake driver and GPUs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_engines
from cuda_driver import gpu_driver
from sample_engines import V1
from test_cuda_support import needs_compiler, serve
from test_doctor import L4, model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cog_triton.engines.base import EngineFamily
from cog_triton.engines.openvino import family as openvino
from cog_triton.engines.registry import open_engine
from cog_triton.errors import EngineIncompatible
from cog_triton.serving import engine_preparation
from cog_triton.settings import load_settings
from cog_triton.sizing import gpu_table
from cog_triton.sizing.gpu_table import Gpu
from cog_triton.system.host_memory import HostMemory
from cog_triton.triton.serve_config import ServeConfig

GIB = 1 << 30
WEIGHTS = 16 * 10**9


def vllm_engine(tmp_path: Path, weights: int = WEIGHTS, **arguments: Any) -> Path:
    """A directory for vLLM of a model of 8 billion weights, whose file is sparse."""
    config = Path(model(tmp_path)) / "config.json"
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with (config.parent / "model.safetensors").open("wb") as file:
        file.truncate(weights)
    made = tmp_path / "engine"
    made.mkdir()
    value = {"model": str(config.parent), "max_model_len": 4096, **arguments}
    (made / "model.json").write_text(json.dumps(value))
    return made


Told = Callable[..., str]


def require(family: EngineFamily, *, alone: bool = True, **given: str) -> None:
    config = ServeConfig({"tensorrt_llm": given})
    engine_preparation._require_memory(load_settings(), family, config, alone=alone)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Told:
    """What is logged of the check of an engine beside some GPUs."""
    caplog.set_level(logging.INFO)

    def check(engine: Path, gpus: list[Gpu], *, alone: bool = True, **given: str) -> str:
        monkeypatch.setattr(gpu_table, "gpus_here", lambda: gpus)
        require(open_engine(engine), alone=alone, **given)
        return " ".join(f"{one.levelname} {one.getMessage()}" for one in caplog.records)

    return check


def gpu(memory: float, free: float | None = None) -> Gpu:
    return Gpu("G", 90, int(memory * GIB), None if free is None else int(free * GIB))


@needs_compiler
def test_a_gpu_that_is_too_small_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    engine = vllm_engine(tmp_path, WEIGHTS, quantization=None)
    small = {**L4, "gpu_mib": 4096, "gpu_count": 2}
    said = serve(tmp_path, gpu_driver(tmp_path / "driver", **small), str(engine), "--triton-only")
    assert "E1305 EngineIncompatible" in said
    assert "GiB of weights on each, and the engine may take 3.7 of its 4.0 GiB" in said
    assert "or tensor_parallel_size, or take a smaller" in said
    assert "tritonserver" not in said


@pytest.mark.parametrize(
    ("memory", "free", "more", "said"),
    [
        (15, None, {}, "raise gpu_memory_utilization in model.json, or tensor_parallel_size"),
        (80, 10, {}, "end the other programs on the GPU"),
        (24, None, {"gpu_memory_utilization": 0.5}, "raise gpu_memory_utilization in model.json"),
        (8, None, {}, "It would fit 1 x"),
        (8, None, {"tensor_parallel_size": 2}, None),
        (8, None, {"quantization": "bitsandbytes"}, None),
        (8, None, {"cpu_offload_gb": 10}, None),
        (8, None, {"language_model_only": True}, None),
        (8, None, {"limit_mm_per_prompt": {"image": 2}}, "It would fit 1 x"),
    ],
)
def test_only_what_cannot_run_is_refused(
    memory: float,
    free: float | None,
    more: dict[str, Any],
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: Told,
) -> None:
    engine, here = vllm_engine(tmp_path, **more), [gpu(memory, free)] * 2
    if said is None:
        assert told(engine, here)
        return
    with pytest.raises(EngineIncompatible, match=said):
        told(engine, here)
    monkeypatch.setenv("COG_TRITON_SKIP_PREFLIGHT", "1")
    assert "so this is served" in told(engine, here)


@pytest.mark.parametrize(
    ("config", "weights", "given", "gpus", "said"),
    [
        ({}, 1, {}, [gpu(80, 79)], "by an estimate"),
        ({}, 1, {"alone": False}, [gpu(80, 10)], "by an estimate"),  # it may be an engine of ours
        ({}, 4, {}, [gpu(24)], "by an estimate"),  # copies of the weights, and 32 bits
        ({"quantization_config": {"quant_method": "fp8"}}, 1, {}, [gpu(24)], "by an estimate"),
        ({}, 1, {"gpu_device_ids": "1"}, [gpu(8)], "not compared: gpu_device_ids is given"),
        ({"hidden_size": "wide"}, 1, {}, [gpu(1)], "memory of the GPU: not compared: "),
        ({}, 1, {}, [], "memory of the GPU: not compared: "),
    ],
)
def test_what_is_not_refused_is_one_line(
    config: dict[str, Any],
    weights: int,
    given: dict[str, Any],
    gpus: list[Gpu],
    said: str,
    tmp_path: Path,
    told: Told,
) -> None:
    engine = vllm_engine(tmp_path, weights * WEIGHTS)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    if config.get("quantization_config"):  # Mistral's own copy
        with (file.parent / "consolidated.safetensors").open("wb") as copy:
            copy.truncate(WEIGHTS)
    found = told(engine, gpus, **given)
    assert found.startswith("INFO ")
    assert found.count(said) == 1


SHAPE = {
    **{"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
}


def built_engine(tmp_path: Path) -> Path:
    """An engine of TensorRT-LLM's that tells its shape, FP8 in the KV cache, for four GPUs."""
    config = {**V1, "pretrained_config": {**V1["pretrained_config"], **SHAPE}}
    return sample_engines.with_manifest(sample_engines.directory(tmp_path / "built", config, 4))


def test_a_built_engine_is_held_against_memory_by_its_rank_files(
    tmp_path: Path, told: Told
) -> None:
    engine = built_engine(tmp_path)
    for path in engine.glob("rank*.engine"):
        with path.open("r+b") as file:
            file.truncate(10 * GIB)
    tokenizer = Tokenizer(WordLevel({"a": 0}, "a"))
    tokenizer.save(str(engine / "tokenizer.json"))
    (engine / "tokenizer_config.json").write_text("{}")
    assert "by an estimate" in told(engine, [gpu(24)] * 4)
    with pytest.raises(EngineIncompatible, match=r"10\.0 GiB of weights on each"):
        told(engine, [gpu(8)] * 4)


def test_an_engine_for_the_cpu_is_told_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "openvino_model.bin").open("wb") as file:
        file.truncate(GIB)
    caplog.set_level(logging.INFO)
    limits: Any = None
    for free, level in ((2 * GIB, "INFO"), (GIB // 2, "WARNING")):
        caplog.clear()
        here = HostMemory(free, "MemAvailable of the machine")
        monkeypatch.setattr(openvino, "host_memory", lambda here=here: here)
        openvino.OpenVINOFamily(tmp_path, limits).check_environment(load_settings())
        assert [one.levelname for one in caplog.records] == [level]
