"""Refusals by name of what a request asks and its engine cannot do."""

from __future__ import annotations

from cog_triton.engines.abilities import Abilities
from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai.guide_fields import GivenGuide
from cog_triton.serving.openai.requests import ChatRequest, OpenAIRequest
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import ABILITIES


def check_abilities(request: OpenAIRequest, abilities: Abilities) -> None:
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
    for name in ABILITIES:
        if getattr(request, name) and name not in abilities.sampling:
            raise InvalidArgument(f"{name}: this engine does not support it")
    if request.prompt_log_probs and not abilities.prompt_log_probs:
        raise InvalidArgument(
            "echo: not supported with logprobs: this engine does not tell those of the prompt"
        )


def check_guide(given: GivenGuide | None, abilities: Abilities) -> Guide | None:
    """The guide, if the engine can follow it; raises E1005 naming the field otherwise."""
    if given is None:
        return None
    field, guide = given
    if guide.kind in abilities.guides:
        return guide
    if not abilities.guides:
        rule = "only type 'text' is supported" if field == "response_format" else "not supported"
        raise InvalidArgument(f"{field}: {rule}: this engine has no guided decoding")
    known = ", ".join(sorted(abilities.guides))
    raise InvalidArgument(f"{field}: not supported: this engine is guided by {known} alone")
