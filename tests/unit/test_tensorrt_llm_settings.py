"""Settings of a TensorRT-LLM engine: rendered for the backend, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorrt_llm_engines
from hypothesis import given
from hypothesis import strategies as st
from tensorrt_llm_engines import V0_9, V1, parameters, render

from cog_triton.engines.tensorrt_llm.backend_settings import Parameters, notation
from cog_triton.errors import InvalidPredictorConfig
from cog_triton.triton.serve_config import MODELS, load_serve_config

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
SPECULATIVE = {"medusa": 4, "lookahead": 8, "redrafter": 16, "eagle": 32}
LOOKAHEAD = {
    "lookahead_window_size": 4,
    "lookahead_ngram_size": 3,
    "lookahead_verification_set_size": 5,
}
PAGED = "build_config__plugin_config__use_paged_context_fmha"
TP2 = {"pretrained_config__mapping": {"world_size": 2, "tp_size": 2}}
# One setting that is wrong: its name and value, the rule, other arguments, the engine.
Wrong = tuple[str, Any, str, dict[str, Any], dict[str, Any]]
WRONG: list[Wrong] = [
    ("triton_backend", "python", "must be tensorrtllm", {}, {}),
    ("triton_max_batch_size", 65, "not be above the engine's max_batch_size, 64", {}, {}),
    ("triton_max_batch_size", 0, "greater than or equal to 1", {}, {}),
    ("triton_max_batch_size", True, "must be a whole number", {}, {}),
    ("decoupled_mode", "maybe", "must be true or false", {}, {}),
    ("batching_strategy", "V1", "no static batching any more", {}, {}),
    (
        "batching_strategy",
        "inflight_fused_batchin",
        "did you mean 'inflight_fused_batching'",
        {},
        {},
    ),
    ("batch_scheduler_policy", "max_utilisation", "did you mean 'max_utilization'", {}, {}),
    ("max_queue_size", -1, "greater than or equal to 0", {}, {}),
    ("max_queue_delay_microseconds", 1.5, "must be a whole number", {}, {}),
    ("enable_chunked_context", True, "use_paged_context_fmha", {}, {PAGED: False}),
    ("enable_kv_cache_reuse", True, "use_paged_context_fmha", {}, {PAGED: False}),
    (
        "enable_kv_cache_reuse",
        True,
        "paged KV cache False",
        {},
        {"build_config__kv_cache_type": "CONTINUOUS"},
    ),
    ("kv_cache_free_gpu_mem_fraction", 1.0, "less than 1", {}, {}),
    ("kv_cache_free_gpu_mem_fraction", 0, "greater than 0", {}, {}),
    ("kv_cache_free_gpu_mem_fraction", "most", "must be a number", {}, {}),
    (
        "kv_cache_host_memory_bytes",
        1 << 30,
        "needs enable_kv_cache_reuse",
        {"enable_kv_cache_reuse": False},
        {},
    ),
    ("kv_cache_host_memory_bytes", -1, "greater than or equal to 0", {}, {}),
    ("cross_kv_cache_fraction", 0.5, "needs encoder_engine_dir", {}, {}),
    (
        "encoder_engine_dir",
        "/no/such/encoder",
        "no such directory",
        {"cross_kv_cache_fraction": 0.5},
        {},
    ),
    ("max_attention_window_size", "4096;1024", "with commas between", {}, {}),
    ("max_attention_window_size", "0", "must be 1 or more", {}, {}),
    ("max_beam_width", 2, "the engine's max_beam_width, 1", {}, {}),
    ("engine_dir", "/other/engine", "say which by ENGINE_DIR or COG_WEIGHTS", {}, {}),
    ("engine_dir", "${engine_dir}", "template that was not filled in", {}, {}),
    ("gpu_device_ids", "0", "must be 2 different ids", {}, TP2),
    ("gpu_device_ids", "0,0", "must be 2 different ids", {}, TP2),
    ("gpu_device_ids", "zero", "must be whole numbers", {}, {}),
    ("num_nodes", 3, "2 ranks, which must be equally many", {}, TP2),
    ("gpu_weights_percent", 0.5, "weight_streaming", {}, {}),
    ("decoding_mode", "medusa", "built for none of the speculative ones", {}, {}),
    (
        "decoding_mode",
        "top_k",
        "built for eagle",
        {},
        {"build_config__speculative_decoding_mode": 32},
    ),
    ("decoding_mode", "beam_search", "needs max_beam_width above 1", {}, {}),
    ("medusa_choices", "{0}", "needs an engine built for medusa", {}, {}),
    ("medusa_choices", "0, 1", "must be paths of a tree", {}, {}),
    ("eagle_choices", "{0}, {0, 1}", "needs an engine built for eagle", {}, {}),
    ("lookahead_window_size", 4, "needs an engine built for lookahead", {}, {}),
    (
        "lookahead_ngram_size",
        None,
        "must be set for an engine built for lookahead",
        {**LOOKAHEAD, "lookahead_ngram_size": None},
        {"build_config__speculative_decoding_mode": 8},
    ),
    ("guided_decoding_backend", "xgrammar", "needs xgrammar_tokenizer_info_path", {}, {}),
    ("guided_decoding_backend", "outlines", "must be xgrammar", {}, {}),
    (
        "xgrammar_tokenizer_info_path",
        "xgrammar_tokenizer_info.json",
        "needs guided_decoding_backend",
        {},
        {},
    ),
    (
        "xgrammar_tokenizer_info_path",
        "missing.json",
        "cannot be read",
        {"guided_decoding_backend": "xgrammar"},
        {},
    ),
    (
        "xgrammar_tokenizer_info_path",
        "generation_config.json",
        "has no encoded_vocab, tokenizer_str, stop_token_ids",
        {"guided_decoding_backend": "xgrammar"},
        {},
    ),
    ("tokenizer_dir", "/tokenizer", "is not read by the backend", {}, {}),
    ("lora_cache_max_adapter_size", 16, "needs an engine built with lora_plugin", {}, {}),
    (
        "lora_cache_optimal_adapter_size",
        65,
        "must not be above lora_cache_max_adapter_size, 64",
        {},
        {"build_config__plugin_config__lora_plugin": "auto"},
    ),
    (
        "lora_prefetch_dir",
        "/no/such/adapters",
        "no such directory",
        {},
        {"build_config__plugin_config__lora_plugin": "auto"},
    ),
    ("cuda_graph_cache_size", 8, "needs cuda_graph_mode", {}, {}),
    ("cuda_graph_mode", "yes", "must be true or false", {}, {}),
    ("logits_datatype", "TYPE_FP16", "must be TYPE_FP32: the engine's is float32", {}, {}),
    ("logits_datatype", "float32", "must be TYPE_FP32 or TYPE_FP16 or TYPE_BF16", {}, {}),
    ("prompt_embedding_table_data_type", "TYPE_FP16", "must be TYPE_BF16", {}, {}),
    ("kv_cache_free_gpu_memory_fraction", 0.9, "'kv_cache_free_gpu_mem_fraction'", {}, {}),
    ("frobnicate", 1, "unknown setting of a TensorRT-LLM engine", {}, {}),
]


def refusal(
    directory: Path, config: dict[str, Any], arguments: dict[str, Any], **changes: Any
) -> str:
    opened = tensorrt_llm_engines.family(directory / "engine", config, **changes)
    with pytest.raises(InvalidPredictorConfig) as caught:
        render(opened, directory / "repo", {"tensorrt_llm": arguments})
    return caught.value.detail


@pytest.mark.parametrize(("name", "value", "rule", "others", "engine"), WRONG)
def test_an_invalid_setting_is_refused_by_name(
    name: str,
    value: Any,
    rule: str,
    others: dict[str, Any],
    engine: dict[str, Any],
    tmp_path: Path,
) -> None:
    arguments = {**others, name: value}
    said = refusal(tmp_path, V1, arguments, **engine)
    assert said.startswith(f"tensorrt_llm.args.{name}="), said
    assert rule in said
    assert str(value) in said


def test_all_violations_are_reported_at_once(tmp_path: Path) -> None:
    said = refusal(
        tmp_path, V1, {"cuda_graph_cache_size": 4, "max_beam_width": 4, "tokenizer_dir": "/"}
    )
    for name in ("cuda_graph_cache_size", "max_beam_width", "tokenizer_dir"):
        assert f"tensorrt_llm.args.{name}=" in said


@pytest.mark.parametrize(
    ("name", "value"), [("kv_cache_host_memory_bytes", 0), ("cuda_graph_mode", False)]
)
def test_a_setting_newer_than_the_release_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    said = refusal(tmp_path, V0_9, {name: value})
    assert said.startswith(f"tensorrt_llm.args.{name}={value!r}: TensorRT-LLM 0.9.0 has no such")


def test_a_decoding_mode_newer_than_the_release_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, V0_9, {"decoding_mode": "eagle"})
    assert "decoding_mode='eagle': TensorRT-LLM 0.9.0 has no such mode" in said


def test_static_batching_is_accepted_before_0_20(tmp_path: Path) -> None:
    opened = tensorrt_llm_engines.family(tmp_path / "engine", V0_9)
    configs = render(opened, tmp_path / "repo", {"tensorrt_llm": {"batching_strategy": "V1"}})
    assert parameters(configs["tensorrt_llm"])["gpt_model_type"] == "V1"


@pytest.mark.parametrize("name", ["tensorrt-llm-0.9.yaml", "tensorrt-llm.yaml"])
def test_example_configs_render(name: str, tmp_path: Path) -> None:
    config = load_serve_config(CONFIGS / name)
    opened = tensorrt_llm_engines.family(tmp_path / "engine")
    render(opened, tmp_path / "repo", {model: dict(config.arguments_of(model)) for model in MODELS})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lookahead.yaml", {"build_config__speculative_decoding_mode": 8}),
        ("lora.yaml", {"build_config__plugin_config__lora_plugin": "auto"}),
    ],
)
def test_example_configs_of_special_engines_render(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    arguments = dict(load_serve_config(CONFIGS / name).arguments_of("tensorrt_llm"))
    opened = tensorrt_llm_engines.family(tmp_path / "engine", **changes)
    found = parameters(
        render(opened, tmp_path / "repo", {"tensorrt_llm": arguments})["tensorrt_llm"]
    )
    assert found.items() >= {key: str(value) for key, value in arguments.items()}.items()
    assert "needs an engine" in refusal(tmp_path / "other", V1, arguments) or name != "lora.yaml"


def test_every_example_config_is_tested() -> None:
    tested = {"tensorrt-llm-0.9.yaml", "tensorrt-llm.yaml", "lookahead.yaml", "lora.yaml"}
    tested.add("whole-answers.yaml")
    assert {path.name for path in CONFIGS.iterdir()} == tested


def test_every_setting_can_be_set(tmp_path: Path) -> None:
    """Each lands in the config under the key that the backend reads."""
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    arguments: dict[str, Any] = {
        "triton_backend": "tensorrtllm",
        "triton_max_batch_size": "8",
        "decoupled_mode": "True",
        "batching_strategy": "inflight_batching",
        "batch_scheduler_policy": "max_utilization",
        "max_queue_delay_microseconds": 100,
        "max_queue_size": 7,
        "enable_chunked_context": "true",
        "max_beam_width": 1,
        "engine_dir": str(tmp_path / "engine") + "/",
        "encoder_engine_dir": str(encoder),
        "gpu_device_ids": "0,1;2,3",
        "num_nodes": 1,
        "gpu_weights_percent": 1,
        "enable_kv_cache_reuse": True,
        "kv_cache_free_gpu_mem_fraction": 0.5,
        "max_tokens_in_paged_kv_cache": 2560,
        "kv_cache_host_memory_bytes": 1 << 34,
        "kv_cache_onboard_blocks": False,
        "cross_kv_cache_fraction": 0.5,
        "max_attention_window_size": [4096, 1024],
        "sink_token_length": 4,
        "decoding_mode": "medusa",
        "medusa_choices": "{0}, {0, 0}",
        "guided_decoding_backend": "xgrammar",
        "xgrammar_tokenizer_info_path": "xgrammar_tokenizer_info.json",
        "lora_cache_optimal_adapter_size": 8,
        "lora_cache_max_adapter_size": 32,
        "lora_cache_gpu_memory_fraction": 0.1,
        "lora_cache_host_memory_bytes": 1 << 30,
        "lora_prefetch_dir": str(encoder),
        "enable_trt_overlap": False,
        "multi_block_mode": True,
        "enable_context_fmha_fp32_acc": True,
        "cuda_graph_mode": True,
        "cuda_graph_cache_size": 16,
        "exclude_input_in_output": True,
        "normalize_log_probs": False,
        "cancellation_check_period_ms": 10,
        "stats_check_period_ms": 20,
        "recv_poll_period_ms": 5,
        "iter_stats_max_iterations": 100,
        "request_stats_max_iterations": 0,
        "logits_datatype": "TYPE_FP32",
        "prompt_embedding_table_data_type": "TYPE_BF16",
        "encoder_input_features_data_type": "TYPE_BF16",
    }
    apart = {"tokenizer_dir", "eagle_choices", *LOOKAHEAD}
    assert Parameters.model_fields.keys() == arguments.keys() | apart
    opened = tensorrt_llm_engines.family(
        tmp_path / "engine",
        build_config__speculative_decoding_mode=4,
        build_config__plugin_config__lora_plugin="auto",
        **TP2,
    )
    config = render(opened, tmp_path / "repo", {"tensorrt_llm": arguments})["tensorrt_llm"]
    assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (8, [8])
    assert config.dynamic_batching.max_queue_delay_microseconds == 100
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 7
    assert config.instance_group[0].count == 2
    assert config.model_transaction_policy.decoupled
    types = {tensor.name: tensor.data_type for tensor in (*config.input, *config.output)}
    assert types["encoder_input_features"] == types["prompt_embedding_table"] == 14  # BF16
    assert types["context_logits"] == types["draft_logits"] == 11  # FP32
    written_otherwise = {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "encoder_model_path": str(encoder),
        "gpt_model_path": str(tmp_path / "engine"),
        "gpt_model_type": "inflight_batching",
        "gpu_weights_percent": "1.0",
        "max_attention_window_size": "4096,1024",
        "tokenizer_dir": "",
        "xgrammar_tokenizer_info_path": str(tmp_path / "engine/xgrammar_tokenizer_info.json"),
    }
    renamed = {"batching_strategy", "engine_dir", "encoder_engine_dir"}
    of_config = {name for name in arguments if name.startswith(("triton_", "max_queue_"))}
    of_config |= {name for name in arguments if name.endswith(("_datatype", "_data_type"))}
    as_given = arguments.keys() - renamed - of_config - {"decoupled_mode"}
    assert parameters(config) == {
        **{name: str(arguments[name]).lower() for name in as_given},
        **written_otherwise,
    }


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_a_speculative_engine_gets_its_decoding_mode(mode: str, tmp_path: Path) -> None:
    opened = tensorrt_llm_engines.family(
        tmp_path / "engine", build_config__speculative_decoding_mode=SPECULATIVE[mode]
    )
    arguments = LOOKAHEAD if mode == "lookahead" else {}
    config = render(opened, tmp_path / "repo", {"tensorrt_llm": arguments})["tensorrt_llm"]
    assert parameters(config)["decoding_mode"] == mode


def test_kv_cache_reuse_is_off_where_the_engine_cannot(tmp_path: Path) -> None:
    opened = tensorrt_llm_engines.family(tmp_path / "engine", **{PAGED: False})
    config = render(opened, tmp_path / "repo")["tensorrt_llm"]
    assert parameters(config)["enable_kv_cache_reuse"] == "false"


def test_settings_without_a_value_are_unset() -> None:
    arguments = {"max_attention_window_size": None, "medusa_choices": "", "decoding_mode": None}
    assert Parameters.parse(arguments) == Parameters()
    assert not Parameters.parse(arguments).model_fields_set


IDS = st.lists(st.integers(0, 99), min_size=1)


@given(IDS, st.lists(IDS, min_size=1))
def test_lists_survive_the_backends_notation(ids: list[int], groups: list[list[int]]) -> None:
    for name, value in (
        ("max_attention_window_size", ids),
        ("gpu_device_ids", groups),
        ("medusa_choices", groups),
    ):
        parsed = getattr(Parameters.parse({name: value}), name)
        again = getattr(Parameters.parse({name: notation(name, parsed)}), name)
        assert again == parsed
        assert [list(item) if isinstance(item, tuple) else item for item in parsed] == value


@given(st.sampled_from(list(Parameters.model_fields)), st.none() | st.text() | st.binary()
       | st.integers() | st.floats() | st.booleans() | st.lists(st.integers() | st.text())
       | st.dictionaries(st.text(), st.integers()))  # fmt: skip
def test_any_value_is_accepted_or_refused_by_name(name: str, value: Any) -> None:
    said = None
    try:
        Parameters.parse({name: value})
    except InvalidPredictorConfig as error:
        said = error.detail
    assert said is None or said.startswith(f"tensorrt_llm.args.{name}=")
