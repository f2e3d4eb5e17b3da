"""Rules of a build config with a draft model: what it and its target must say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cog_triton.builder.command_line import shown

if TYPE_CHECKING:
    from cog_triton.builder.config import BuildConfig

NUM_DRAFT_TOKENS = 4
"""Tokens that a draft proposes at a time, unless the config says otherwise."""
_MODE = "draft_tokens_external"
_OF_THE_WHOLE = ("draft", "num_draft_tokens", "hf_token", "runtime", "lora_adapters", "world_size")


def proposed(config: BuildConfig) -> int:
    """Tokens that the draft of `config` proposes at a time."""
    return config.num_draft_tokens or NUM_DRAFT_TOKENS


def problems(config: BuildConfig) -> Iterator[str]:
    """Each rule that `config` breaks, beginning with the key."""
    if config.draft is None:
        if config.num_draft_tokens is not None:
            yield f"num_draft_tokens: {config.num_draft_tokens}: is for a config with a draft"
        return
    draft, ours, theirs = config.draft, config.build.args, config.draft.build.args
    for key in _OF_THE_WHOLE:
        if getattr(draft, key) not in (None, {}):
            yield f"draft.{key}: is of the whole config, and not of its draft"
    if "openvino" in (config.example_name, draft.example_name):
        yield "draft: is for engines of TensorRT-LLM"
    mode, most = ours.get("speculative_decoding_mode"), ours.get("max_draft_len")
    if mode != _MODE:
        yield f"build.args.speculative_decoding_mode: {shown(mode)}: must be {_MODE} with a draft"
    if not isinstance(most, int) or most < proposed(config):
        yield (
            f"build.args.max_draft_len: {shown(most)}: must be num_draft_tokens,"
            f" {proposed(config)}, or more"
        )
    if "speculative_decoding_mode" in theirs:
        yield "draft.build.args.speculative_decoding_mode: a draft is an engine like any other"
    for key in ("max_input_len", "max_seq_len", "max_batch_size"):
        here, there = ours.get(key), theirs.get(key)
        if isinstance(here, int) and isinstance(there, int) and there < here:
            yield f"draft.build.args.{key}: {there}: must not be less than the target's, {here}"
    for prefix, each in (("", config), ("draft.", draft)):
        for name, step in each.steps():
            for key in ("tp_size", "pp_size", "cp_size"):
                if step.args.get(key) not in (None, 1):
                    yield (
                        f"{prefix}{name}.args.{key}: {shown(step.args[key])}: must be 1: with a"
                        " draft, engines of several GPUs are not served"
                    )
    if config.world_size not in (None, 1):
        yield f"world_size: {config.world_size}: must be 1 with a draft"
