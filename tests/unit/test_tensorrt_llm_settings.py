"""Settings of a TensorRT-LLM engine: written into the template of its release, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorrt_llm_engines
from tensorrt_llm_engines import OLD_TEMPLATE, V0_9, V1, parameters, render

from cog_triton.engines import model_config_proto
from cog_triton.engines.tensorrt_llm import model_settings
from cog_triton.errors import InvalidPredictorConfig

SPECULATIVE = {"medusa": 4, "lookahead": 8, "redrafter": 16, "eagle": 32}
PAGED = "build_config__plugin_config__use_paged_context_fmha"
TP2 = {"pretrained_config__mapping": {"world_size": 2, "tp_size": 2}}
EAGLE = {"build_config__speculative_decoding_mode": 32}
# One setting that is wrong: its name and value, the rule, the engine.
WRONG: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("triton_max_batch_size", 65, "not be above the engine's max_batch_size, 64", {}),
    ("triton_max_batch_size", 0, "must be a whole number", {}),
    ("max_beam_width", 2, "not be above the engine's max_beam_width, 1", {}),
    ("enable_chunked_context", True, "use_paged_context_fmha", {PAGED: False}),
    ("enable_chunked_context", "yes", "must be true or false", {}),
    ("enable_kv_cache_reuse", True, "use_paged_context_fmha", {PAGED: False}),
    (
        "enable_kv_cache_reuse",
        True,
        "paged KV cache False",
        {"build_config__kv_cache_type": "CONTINUOUS"},
    ),
    ("kv_cache_free_gpu_mem_fraction", 1.0, "less than 1", {}),
    ("kv_cache_free_gpu_mem_fraction", 0, "greater than 0", {}),
    ("kv_cache_free_gpu_mem_fraction", "most", "must be a number greater", {}),
    ("engine_dir", "/other/engine", "say which by ENGINE_DIR or COG_WEIGHTS", {}),
    ("engine_dir", "${engine_dir}", "say which by ENGINE_DIR or COG_WEIGHTS", {}),
    ("num_nodes", 3, "2 ranks, which must be equally many", TP2),
    ("gpu_device_ids", "0", "must be 2 different ids", TP2),
    ("gpu_device_ids", "0,0", "must be 2 different ids", TP2),
    ("gpu_device_ids", "zero", "must be 1 different ids", {}),
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


def test_all_violations_are_reported_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, V1, {"num_nodes": 4, "max_beam_width": 4, "decoding_mode": "eagle"})
    for name in ("num_nodes", "max_beam_width", "decoding_mode"):
        assert f"tensorrt_llm.args.{name}=" in said


@pytest.mark.usefixtures("old_template")
def test_the_template_of_the_release_says_what_can_be_set(tmp_path: Path) -> None:
    said = refusal(tmp_path, V0_9, {"kv_cache_host_memory_bytes": 0})
    assert said.startswith("tensorrt_llm.args.kv_cache_host_memory_bytes=0: unknown setting")
    opened = tensorrt_llm_engines.family(tmp_path / "other", V0_9)
    configs = render(opened, tmp_path / "repo", {"tensorrt_llm": {"batching_strategy": "V1"}})
    assert parameters(configs["tensorrt_llm"])["gpt_model_type"] == "V1"


def test_without_its_template_an_old_engine_has_the_older_names(tmp_path: Path) -> None:
    opened = tensorrt_llm_engines.family(tmp_path / "engine", V0_9)
    config = render(opened, tmp_path / "repo")["tensorrt_llm"]
    names = {tensor.name for tensor in config.input}
    assert {"min_length", "random_seed"} <= names
    assert not {"min_tokens", "seed"} & names


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


def test_settings_without_a_value_are_unset() -> None:
    arguments = {"max_attention_window_size": None, "medusa_choices": "", "decoding_mode": None}
    assert model_settings.given(arguments) == {}
