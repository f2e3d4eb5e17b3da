"""Sampling arguments of the LLM API, from engine requests; what it would ignore is refused."""

from __future__ import annotations

from typing import Any

from cog_triton.engines.request import EngineRequest
from cog_triton.engines.request_checks import note_length_penalty
from cog_triton.errors import InvalidArgument

_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_GUIDES = {"json_schema": "json"}


def from_engine_request(request: EngineRequest, *, penalties: bool) -> dict[str, Any]:
    """Arguments of SamplingParams for an engine request; raises E1005.

    `guided_decoding` is left as the arguments of GuidedDecodingParams. Stop words are left out:
    they are matched here, where a prompt of theirs counts as little as for other engines.

    Args:
        penalties: whether the engine's sampler heeds penalties.
    """
    sampling = request.sampling
    note_length_penalty(request)
    values = {**sampling.arguments("llmapi"), "detokenize": False}
    for name, neutral in _NEUTRAL.items():
        value = values[name]
        if value == neutral:
            del values[name]
        elif not penalties:
            raise InvalidArgument(
                f"{name}={value}: TensorRT-LLM's sampler ignores penalties before 1.3, unless"
                " llmapi.yaml has sampler_type: TRTLLMSampler"
            )
    if sampling.greedy:
        values["top_k"] = 1
    if request.return_log_probs:
        values["logprobs"] = 0
    if request.end_id is not None:
        values |= {"end_id": request.end_id} if request.end_id >= 0 else {"ignore_eos": True}
    if request.guide is not None:
        kind = _GUIDES.get(request.guide.kind, request.guide.kind)
        values["guided_decoding"] = {kind: request.guide.text}
    if request.bad_words:
        if any(len(word) > 1 for word in request.bad_words):
            raise InvalidArgument(
                "bad_words_list: the LLM API takes bad words of one token; this one has more:"
                f" {max(request.bad_words, key=len)}"
            )
        values["bad_token_ids"] = [word[0] for word in request.bad_words]
    return values
