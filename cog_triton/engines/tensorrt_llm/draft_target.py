"""Draft-target speculative decoding: the Triton models of a draft engine beside its target.

``tensorrt_llm_draft`` runs the draft, as upstream's repository names it, and ``draft_target`` has
the draft propose tokens and the target verify them (see `cog_triton.backend.draft_loop`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2

from cog_triton.engines.tensorrt_llm import render_config
from cog_triton.engines.tensorrt_llm.backend_settings import Parameters
from cog_triton.engines.tensorrt_llm.engine_directory import Engine

DRAFT_MODEL, LOOP_MODEL = "tensorrt_llm_draft", "draft_target"
# Each takes a share of the memory that is free when it loads, and they load at once.
TARGET_DEFAULTS: Mapping[str, Any] = {"kv_cache_free_gpu_mem_fraction": 0.6}
_DRAFT_FRACTION = 0.15
_LOOP_PY = '''"""Written by cog_triton when the model repository was rendered."""

from cog_triton.backend.draft_loop import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def companions(
    config: Any, parameters: Parameters, target: Engine
) -> dict[str, tuple[Any, str | None]]:
    """Configs of both models by name, and model.py; none without a draft.

    Args:
        config: the rendered one of ``tensorrt_llm``, whose inputs and outputs both have.
        parameters: of the target, resolved.
    """
    if target.draft is None:
        return {}
    draft = model_config_pb2.ModelConfig()
    draft.CopyFrom(config)
    draft.name = DRAFT_MODEL
    given = {
        "kv_cache_free_gpu_mem_fraction": _DRAFT_FRACTION,
        "batch_scheduler_policy": parameters.batch_scheduler_policy,
        "enable_chunked_context": parameters.enable_chunked_context,
    }
    resolved = render_config.resolve_defaults(Parameters.parse(given), target.draft)
    render_config.render_engine_config(draft, resolved, target.draft)
    loop = model_config_pb2.ModelConfig()
    loop.CopyFrom(config)
    loop.name, loop.backend = LOOP_MODEL, "python"
    loop.ClearField("dynamic_batching")
    loop.model_transaction_policy.decoupled = True
    for tensor in loop.input:
        tensor.ClearField("reshape")
        tensor.ClearField("allow_ragged_batch")
    loop.parameters.clear()
    values = {
        "num_draft_tokens": target.num_draft_tokens,
        "max_input_len": min(
            each.config.longest_prompt(chunked=parameters.enable_chunked_context)
            for each in (target, target.draft)
        ),
        "excludes_input": str(target.contract.has_input("exclude_input_in_output")).lower(),
        "cancellation_check_period_ms": parameters.cancellation_check_period_ms,
    }
    for name, value in values.items():
        loop.parameters[name].string_value = str(value)
    loop.instance_group[0].count = 1
    return {DRAFT_MODEL: (draft, None), LOOP_MODEL: (loop, _LOOP_PY)}
