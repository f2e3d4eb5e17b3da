"""Runtime settings that an engine carries in its manifest, from the build config's `runtime`.

They are defaults: a serve config's go before them. An engine may come from anywhere, so that none
of them names a path, lets in more requests than the engine was built for, or takes memory that the
server would not give by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from cog_triton.artifact.engine_manifest import MANIFEST_NAME, Manifest
from cog_triton.engines.tensorrt_llm.backend_settings import Parameters, rule_of
from cog_triton.errors import EngineCorrupt
from cog_triton.system.host_memory import host_memory

_log = logging.getLogger(__name__)

NAMES = (
    "kv_cache_free_gpu_mem_fraction",
    "max_tokens_in_paged_kv_cache",
    "kv_cache_host_memory_bytes",
    "enable_kv_cache_reuse",
    "enable_chunked_context",
    "batch_scheduler_policy",
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "medusa_choices",
    "eagle_choices",
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
)
"""The settings of `Parameters` that an engine may carry."""
MOST_GPU_FRACTION: float = Parameters.model_fields["kv_cache_free_gpu_mem_fraction"].default
"""Largest KV cache fraction that an engine may ask for: what a server gives by itself."""
_LIMITS = {"kv_cache_free_gpu_mem_fraction": (Field(le=MOST_GPU_FRACTION),)}
_HOST_BYTES = ("kv_cache_host_memory_bytes", "lora_cache_host_memory_bytes")
_HOST_SHARE = 4


def _fields() -> Iterator[tuple[str, Any]]:
    for name in NAMES:
        field = Parameters.model_fields[name]
        kind: Any = field.annotation
        for limit in (*field.metadata, *_LIMITS.get(name, ())):
            kind = Annotated[kind, limit]
        yield name, (kind | None, Field(None, description=field.description))


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


if TYPE_CHECKING:

    class RuntimeSettings(_Strict):
        """`runtime` of a build config: the settings of `NAMES`, unset ones None."""

else:
    RuntimeSettings = create_model("RuntimeSettings", __base__=_Strict, **dict(_fields()))
    RuntimeSettings.__doc__ = "Settings of a TensorRT-LLM engine, as defaults of its servers."


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
        rule = rule_of(first, name, NAMES)
        raise EngineCorrupt(f"{origin}: {MANIFEST_NAME}: runtime.{name}={value}: {rule}") from error


def below(given: Mapping[str, Any], carries: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a serve config, `given`, over what the engine `carries`.

    Of host memory, an engine by itself gets a quarter of what is free for each of its caches; a
    log line tells where it asks for more.
    """
    chosen = {name: value for name, value in given.items() if value not in (None, "")}
    defaults = {name: value for name, value in carries.items() if name not in chosen}
    wanted = [name for name in _HOST_BYTES if name in defaults]
    if wanted:
        most = host_memory().free // _HOST_SHARE
        for name in wanted:
            if defaults[name] > most:
                _log.warning(
                    "the engine's %s=%d is lowered to %d, a quarter of the host memory that is"
                    " free: a serve config may say more",
                    *(name, defaults[name], most),
                )
                defaults[name] = most
    if defaults:
        shown = ", ".join(f"{name}={value}" for name, value in defaults.items())
        _log.info("settings that the engine carries: %s", shown)
    return {**defaults, **chosen}
