"""Arguments that need a package which vLLM's Python lacks are refused by name."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from typing import Any

import pytest

from cog_triton.engines.vllm.argument_types import recorded
from cog_triton.engines.vllm.optional_packages import NEEDS, refuse_missing
from cog_triton.errors import InvalidPredictorConfig

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Modules that can be found, none unless a test adds it; leaves the environment alone."""
    names: set[str] = set()

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("vllm.") and "vllm" not in names:
            raise ModuleNotFoundError(name)
        return importlib.machinery.ModuleSpec(name, None) if name in names else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setenv(SAMPLER, "0")
    return names


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}, "numba"),
        ({"attention_backend": "FLASHINFER_MLA"}, "flashinfer"),
        ({"attention_config": {"backend": "TRITON_FLASHINFER"}}, "flashinfer"),
        ({"kernel_config": {"moe_backend": "deep_gemm"}}, "deep_gemm"),
        ({"quantization": "bitsandbytes"}, "bitsandbytes"),
        ({"load_format": "runai_streamer_sharded"}, "runai_model_streamer"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, "lmcache"),
        ({"distributed_executor_backend": "ray"}, "ray"),
        ({"limit_mm_per_prompt": {"image": 1, "video": 2}}, "cv2"),
    ],
)
def test_what_needs_a_missing_package_is_refused(
    installed: set[str], arguments: dict[str, Any], package: str
) -> None:
    with pytest.raises(InvalidPredictorConfig, match=f"^E1202 .*no {package} ") as refused:
        refuse_missing({"max_num_seqs": 8, **arguments})
    ((name, value),) = arguments.items()
    message = str(refused.value)
    if isinstance(value, dict):
        assert any(
            f"model.json: {name}.{key}={wanted!r}" in message for key, wanted in value.items()
        )
    else:
        assert f"model.json: {name}={value!r}" in message
    assert f"name as engine_python a Python that has vLLM and {package}" in message
    installed.add(package)
    refuse_missing(arguments)


def test_any_of_several_modules_will_do(installed: set[str]) -> None:
    installed |= {"vllm", "vllm.third_party.deep_gemm"}
    refuse_missing({"moe_backend": "deep_gemm_mega_moe"})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"speculative_config": {"method": "ngram_gpu"}},
        {"speculative_config": None, "kv_transfer_config": None, "quantization": None},
        {"attention_backend": "FLASH_ATTN", "moe_backend": "auto", "quantization": "fp8"},
        {"limit_mm_per_prompt": {"image": 2, "video": 0}, "load_format": "safetensors"},
    ],
)
def test_the_rest_needs_nothing(installed: set[str], arguments: dict[str, Any]) -> None:
    refuse_missing(arguments)


def test_vllm_samples_without_flashinfer_where_that_is_missing(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SAMPLER)
    refuse_missing({})
    assert os.environ[SAMPLER] == "0"
    monkeypatch.setenv(SAMPLER, "1")
    with pytest.raises(InvalidPredictorConfig, match=f"the environment: {SAMPLER}='1'"):
        refuse_missing({})
    installed.add("flashinfer")
    refuse_missing({})
    assert os.environ[SAMPLER] == "1"


def test_flashinfer_stays_on_where_it_is(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SAMPLER)
    installed.add("flashinfer")
    refuse_missing({})
    assert SAMPLER not in os.environ


def test_arguments_are_vllms_own() -> None:
    names = {argument.partition(".")[0] for need in NEEDS for argument in need.arguments}
    own = {name for types in recorded() for name in types.engine_args}
    assert {name for name in names if not name.isupper()} <= own
    assert all(value == value.lower() for need in NEEDS for value in need.values)
