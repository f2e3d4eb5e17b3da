"""Runtime settings that an engine carries in its manifest, from the build config's `runtime`.

They are defaults: a serve config's go before them. An engine may come from anywhere, so that none
of them names a path, lets in more requests than the engine was built for, or takes memory that the
server would not give by itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cog_triton.artifact.engine_manifest import MANIFEST_NAME, Manifest
from cog_triton.errors import EngineCorrupt, nearest
from cog_triton.system.host_memory import host_memory

_log = logging.getLogger(__name__)

MOST_GPU_FRACTION = 0.9
"""Largest KV cache fraction that an engine may ask for: what the backend takes by itself."""
_HOST_BYTES = ("kv_cache_host_memory_bytes", "lora_cache_host_memory_bytes")
_HOST_SHARE = 4

_Count = Annotated[int, Field(ge=1)]


def _tree(value: Any) -> Any:
    """A tree as TensorRT-LLM writes it, "{0}, {0, 0}", as lists."""
    return json.loads(f"[{value.translate(_BRACKETS)}]") if isinstance(value, str) else value


_BRACKETS = str.maketrans("{}", "[]")
_Tree = Annotated[list[list[int]], BeforeValidator(_tree)]


class RuntimeSettings(BaseModel):
    """Settings of a TensorRT-LLM engine, as defaults of its servers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    kv_cache_free_gpu_mem_fraction: float | None = Field(None, gt=0, le=MOST_GPU_FRACTION)
    """Share of the GPU memory left after loading that the cache takes."""
    max_tokens_in_paged_kv_cache: _Count | None = None
    """Most tokens that the cache holds."""
    kv_cache_host_memory_bytes: int | None = Field(None, ge=0)
    """Bytes of host memory for blocks pushed off the GPU."""
    enable_kv_cache_reuse: bool | None = None
    """Keep keys and values for prompts that begin alike."""
    enable_chunked_context: bool | None = None
    """Prefill long prompts in pieces."""
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] | None = None
    """Never pause a request once begun, or pack as many as fit."""
    lora_cache_optimal_adapter_size: _Count | None = None
    """Rank of an adapter that fills one cache page."""
    lora_cache_max_adapter_size: _Count | None = None
    """Rank of the largest adapter."""
    lora_cache_gpu_memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of the GPU memory left for adapters."""
    lora_cache_host_memory_bytes: _Count | None = None
    """Bytes of host memory for adapters."""
    medusa_choices: _Tree | None = None
    """Tree as "{0}, {0, 0}"."""
    eagle_choices: _Tree | None = None
    """Tree as "{0}, {0, 0}"."""
    lookahead_window_size: _Count | None = None
    """Window of lookahead decoding, tokens."""
    lookahead_ngram_size: _Count | None = None
    """N-gram of lookahead decoding, tokens."""
    lookahead_verification_set_size: _Count | None = None
    """N-grams verified in one step."""


NAMES = tuple(RuntimeSettings.model_fields)


def carried(settings: BaseModel | None) -> dict[str, Any]:
    """What a manifest has of `settings`: JSON values of those that are set, by name."""
    return {} if settings is None else settings.model_dump(mode="json", exclude_none=True)


def of_manifest(manifest: Manifest | None, origin: str) -> dict[str, Any]:
    """The settings that a manifest carries, checked; `origin` names the engine in errors.

    Raises:
        EngineCorrupt: one is unknown or out of range; names it, its value and the rule.
    """
    if manifest is None:
        return {}
    try:
        return carried(RuntimeSettings.model_validate(manifest.runtime))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, value = str(first["loc"][0])[:80], repr(first["input"])[:80]
        rule = first["msg"].replace("Input should be", "must be").replace("'", "")
        if first["type"] == "extra_forbidden":
            rule = f"unknown setting of a TensorRT-LLM engine{nearest(name, NAMES)}"
        raise EngineCorrupt(f"{origin}: {MANIFEST_NAME}: runtime.{name}={value}: {rule}") from error


def below(given: Collection[str], carries: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine `carries` that the serve config, which names those `given`, leaves to it.

    Of host memory, an engine by itself gets a quarter of what is free for each of its caches; a
    log line tells where it asks for more.
    """
    chosen = {name: value for name, value in carries.items() if name not in given}
    most = host_memory().free // _HOST_SHARE if chosen.keys() & {*_HOST_BYTES} else 0
    for name in _HOST_BYTES:
        if chosen.get(name, 0) > most:
            _log.warning(
                "the engine's %s=%d is lowered to %d, a quarter of the host memory that is free:"
                " a serve config may say more",
                *(name, chosen[name], most),
            )
            chosen[name] = most
    if chosen:
        shown = ", ".join(f"{name}={value}" for name, value in chosen.items())
        _log.info("settings that the engine carries: %s", shown)
    return chosen
