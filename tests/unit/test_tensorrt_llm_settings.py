"""Settings of a TensorRT-LLM engine: of a serve config, of the engine itself, or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import sample_engines
import tensorrt_llm_engines
from tensorrt_llm_engines import OLD_TEMPLATE, V0_9, V1, parameters, render

from cog_triton.builder.config import parse_config
from cog_triton.engines import model_config_proto
from cog_triton.engines.tensorrt_llm import model_settings, runtime_settings
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.errors import (
    BuildConfigInvalid,
    EngineCorrupt,
    EngineIncompatible,
    InvalidPredictorConfig,
)
from cog_triton.system.host_memory import HostMemory

SPECULATIVE = {"medusa": 4, "lookahead": 8, "redrafter": 16, "eagle": 32}
PAGED = "build_config__plugin_config__use_paged_context_fmha"
TP2 = {"pretrained_config__mapping": {"world_size": 2, "tp_size": 2}}
EAGLE = {"build_config__speculative_decoding_mode": 32}
# One setting that is wrong: its name and value, the rule, the engine.
WRONG: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("triton_max_batch_size", 65, "not be above the engine's max_batch_size, 64", {}),
    ("max_beam_width", 2, "not be above the engine's max_beam_width, 1", {}),
    ("enable_chunked_context", True, "use_paged_context_fmha", {PAGED: False}),
    ("enable_kv_cache_reuse", True, "use_paged_context_fmha", {PAGED: False}),
    (
        "enable_kv_cache_reuse",
        True,
        "paged KV cache False",
        {"build_config__kv_cache_type": "CONTINUOUS"},
    ),
    ("kv_cache_free_gpu_mem_fraction", 1.0, "less than 1", {}),
    ("engine_dir", "/other/engine", "say which by ENGINE_DIR or COG_WEIGHTS", {}),
    ("num_nodes", 3, "2 ranks, which must be equally many", TP2),
    ("gpu_device_ids", "0", "must be 2 different ids", TP2),
    ("decoding_mode", "medusa", "built for none of the speculative ones", {}),
    ("decoding_mode", "top_k", "built for eagle", EAGLE),
    ("logits_datatype", "TYPE_FP16", "must be TYPE_FP32: the engine's is float32", {}),
    # What does not fit the template.
    ("decoupled_mode", "maybe", "not for 'model_transaction_policy", {}),
    ("max_queue_size", -1, "not for 'default_queue_policy", {}),
    ("prompt_embedding_table_data_type", "float16", "not for '{ name: \"prompt_embedding", {}),
    # What it does not have.
    ("kv_cache_free_gpu_memory_fraction", 0.9, "'kv_cache_free_gpu_mem_fraction'", {}),
    ("frobnicate", 1, "unknown setting of a TensorRT-LLM engine", {}),
]


@pytest.fixture
def old_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that has NVIDIA's template of 0.9."""
    monkeypatch.setattr(model_settings, "NVIDIAS_TEMPLATE", OLD_TEMPLATE)


def refusal(
    directory: Path, config: dict[str, Any], arguments: dict[str, Any], **changes: Any
) -> str:
    opened = tensorrt_llm_engines.family(directory / "engine", config, **changes)
    with pytest.raises(InvalidPredictorConfig) as caught:
        render(opened, directory / "repo", {"tensorrt_llm": arguments})
    return caught.value.detail


@pytest.mark.parametrize(("name", "value", "rule", "engine"), WRONG)
def test_an_invalid_setting_is_refused_by_name(
    name: str, value: Any, rule: str, engine: dict[str, Any], tmp_path: Path
) -> None:
    said = refusal(tmp_path, V1, {name: value}, **engine)
    assert said.startswith(f"tensorrt_llm.args.{name}={value!r}: "), said
    assert rule in said


@pytest.mark.usefixtures("old_template")
def test_the_template_of_the_release_says_what_can_be_set(tmp_path: Path) -> None:
    said = refusal(tmp_path, V0_9, {"kv_cache_host_memory_bytes": 0})
    assert said.startswith("tensorrt_llm.args.kv_cache_host_memory_bytes=0: unknown setting")
    opened = tensorrt_llm_engines.family(tmp_path / "other", V0_9)
    configs = render(opened, tmp_path / "repo", {"tensorrt_llm": {"batching_strategy": "V1"}})
    assert parameters(configs["tensorrt_llm"])["gpt_model_type"] == "V1"


def test_every_setting_can_be_set(tmp_path: Path) -> None:
    """Each lands in the config under the key that the backend reads."""
    template = model_settings.template_path().read_text("utf-8")
    given: dict[str, Any] = {
        name: f"a {name}\n\"'"
        for name in model_config_proto.variables(template)
        if name not in model_config_proto.TEMPLATE_DEFAULTS
    }
    given |= {
        "triton_max_batch_size": "8",
        "decoupled_mode": "True",
        "max_queue_delay_microseconds": 100,
        "max_queue_size": 7,
        "encoder_input_features_data_type": "TYPE_BF16",
        "enable_chunked_context": "true",
        "enable_kv_cache_reuse": True,
        "max_beam_width": 1,
        "kv_cache_free_gpu_mem_fraction": 0.5,
        "engine_dir": str(tmp_path / "engine") + "/",
        "gpu_device_ids": [[0, 1], [2, 3]],
        "num_nodes": 1,
        "decoding_mode": "medusa",
        "medusa_choices": [[0], [0, 0]],
        "max_attention_window_size": [4096, 1024],
    }
    changes = {"build_config__speculative_decoding_mode": 4, **TP2}
    opened = tensorrt_llm_engines.family(tmp_path / "engine", **changes)
    config = render(opened, tmp_path / "repo", {"tensorrt_llm": given})["tensorrt_llm"]
    assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (8, [8])
    assert config.dynamic_batching.max_queue_delay_microseconds == 100
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 7
    assert config.instance_group[0].count == 2
    assert config.model_transaction_policy.decoupled
    types = {tensor.name: tensor.data_type for tensor in (*config.input, *config.output)}
    assert types["encoder_input_features"] == types["prompt_embedding_table"] == 14  # BF16
    assert types["context_logits"] == types["draft_logits"] == 11  # FP32
    written = parameters(config)
    keys = {"batching_strategy": "gpt_model_type", "encoder_engine_dir": "encoder_model_path"}
    expected = {
        **{keys.get(name, name): model_settings.notation(name, given[name]) for name in given},
        "engine_dir": str(tmp_path / "engine"),
        "xgrammar_tokenizer_info_path": str(
            tmp_path / "engine" / given["xgrammar_tokenizer_info_path"]
        ),
        "gpu_device_ids": "0,1;2,3",
        "medusa_choices": "{0}, {0, 0}",
        "max_attention_window_size": "4096,1024",
    }
    expected["gpt_model_path"] = expected.pop("engine_dir")
    expected["FORCE_CPU_ONLY_INPUT_TENSORS"] = "no"
    assert written == {name: expected[name] for name in written}


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_a_speculative_engine_gets_its_decoding_mode(mode: str, tmp_path: Path) -> None:
    opened = tensorrt_llm_engines.family(
        tmp_path / "engine", build_config__speculative_decoding_mode=SPECULATIVE[mode]
    )
    config = render(opened, tmp_path / "repo")["tensorrt_llm"]
    assert parameters(config)["decoding_mode"] == mode


def test_kv_cache_reuse_is_off_where_the_engine_cannot(tmp_path: Path) -> None:
    opened = tensorrt_llm_engines.family(tmp_path / "engine", **{PAGED: False})
    config = render(opened, tmp_path / "repo")["tensorrt_llm"]
    assert parameters(config)["enable_kv_cache_reuse"] == "false"


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
        ({"kv_cache_host_memory_byte": 9}, "did you mean 'kv_cache_host_memory_bytes'"),
        ({"kv_cache_free_gpu_mem_fraction": 0.91}, "=0.91: must be less than or equal to 0.9"),
        ({"batch_scheduler_policy": "x"}, "must be guaranteed_no_evict or max_utilization"),
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


def test_an_engine_with_a_draft_beside_it_is_refused(tmp_path: Path) -> None:
    path = sample_engines.with_manifest(tensorrt_llm_engines.make(tmp_path / "engine", V1))
    manifest = json.loads((path / "cog-triton.json").read_text("utf-8"))
    draft = {"model_id": "small", "revision": None, "num_draft_tokens": 3}
    (path / "cog-triton.json").write_text(json.dumps({**manifest, "schema": 2, "draft": draft}))
    with pytest.raises(EngineIncompatible, match=r"draft: .* serve its model by vLLM"):
        TensorRTLLMFamily.open(path)
