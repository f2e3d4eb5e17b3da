"""Refusals by name of what a request asks and its engine cannot do."""

from __future__ import annotations

from cog_triton.engines.abilities import Abilities
from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai.requests import ChatRequest, GenerationRequest


def check_abilities(request: GenerationRequest, abilities: Abilities) -> None:
    """Raise E1005 naming the field that the engine cannot honour."""
    field = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    asked, most = request.top_log_probs, abilities.top_log_probs
    if asked > most:
        rule = (
            f"at most {most} on this engine"
            if most
            else "not supported: this engine tells the probability of the chosen token alone; use 0"
        )
        raise InvalidArgument(f"{field}={asked}: {rule}")
    if request.prompt_log_probs and not abilities.prompt_log_probs:
        raise InvalidArgument(
            "echo: not supported with logprobs: this engine does not tell those of the prompt"
        )
