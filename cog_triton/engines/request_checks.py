"""Request checks that engines share: token ids and lengths against the engine's limits."""

from __future__ import annotations

import logging

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument, PromptTooLong
from cog_triton.system.log_notes import log_once

_log = logging.getLogger(__name__)


def check_prompt(
    request: EngineRequest,
    *,
    max_seq_len: int,
    max_input_len: int | None = None,
    vocab_size: int | None = None,
) -> None:
    """Raise E1005 for token ids that the model does not have, E1002 for lengths beyond a limit."""
    ids = request.input_ids
    size, max_tokens = len(ids), request.sampling.max_tokens
    if not size:
        raise InvalidArgument("input_ids: empty; at least one token is required")
    if vocab_size is not None:
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            raise InvalidArgument(
                f"input_ids: holds {low if low < 0 else high}; must be from 0 to"
                f" {vocab_size - 1}, the model's vocabulary"
            )
    prompt = size - request.resumed_tokens
    if max_input_len is not None and prompt > max_input_len:
        raise PromptTooLong(
            f"Prompt length ({prompt}) exceeds maximum input length ({max_input_len})"
        )
    if size + max_tokens > max_seq_len:
        raise PromptTooLong(
            f"Prompt length ({size}) and request_output_len ({max_tokens})"
            f" exceed maximum sequence length ({max_seq_len})"
        )


def note_length_penalty(request: EngineRequest) -> None:
    """Log that a length penalty has no effect, on engines without beam search."""
    if request.sampling.length_penalty != 1:
        log_once(_log, "length_penalty has no effect without beam search, which this engine lacks")
