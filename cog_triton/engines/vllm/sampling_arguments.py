"""Sampling arguments of vLLM, from engine requests and from clients of ``vllm_model``; limits.

Model runner V2 keeps token ids of a request in arrays of a fixed size and raises beyond it, which
ends the engine; neither runner looks whether bad words are in the vocabulary. vLLM itself checks
only the number of bad words given as text, and that since 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cog_triton.engines.request import EngineRequest, note_length_penalty
from cog_triton.engines.vllm.argument_types import ArgumentTypes, convert, types_of
from cog_triton.errors import InvalidArgument, nearest
from cog_triton.system.printable import shortened
from cog_triton.text import client_json

LORA_NAME = "lora_name"
MADE = "cog_triton_made"
"""Key of ``extra_args`` with the tokens of `EngineRequest.made`, which clients must not set."""
RECORDED = types_of()
_KINDS = {"json_schema": "json", "native_tag": "structural_tag"}
# Fields that clients must not set.
_INTERNAL = ("output_kind", "skip_clone", "output_text_buffer_length")


def from_engine_request(request: EngineRequest) -> dict[str, Any]:
    """Arguments of SamplingParams for an engine request; raises E1005.

    Stop words are left out: vLLM takes them as text only. Bad words are passed as token ids;
    see `cog_triton.engines.vllm.engine_api.sampling_params`.
    """
    note_length_penalty(request)
    values = {"temperature": 0.0, **request.sampling.arguments("vllm"), "detokenize": False}
    if request.made:
        values["extra_args"] = {MADE: list(request.made)}
    if request.guide is not None:
        kind = _KINDS.get(request.guide.kind, request.guide.kind)
        values["structured_outputs"] = {kind: request.guide.text}
    if request.return_log_probs:
        values["logprobs"] = request.top_log_probs
        if request.prompt_log_probs:
            values["prompt_logprobs"] = request.top_log_probs
    if request.end_id is not None:
        values["ignore_eos"] = True
        if request.end_id >= 0:
            values["stop_token_ids"] = [request.end_id]
    return values


def names(types: ArgumentTypes = RECORDED) -> list[str]:
    """Names of the sampling parameters that clients may set."""
    return [LORA_NAME, *(name for name in types.sampling_params if name not in _INTERNAL)]


def from_client(parameters: Mapping[str, Any], types: ArgumentTypes = RECORDED) -> dict[str, Any]:
    """Check and convert a client's sampling_parameters to vLLM's types; raises E1005.

    Values may be text, as vllm_backend's sample client sends them. ``lora_name`` stays in.
    """
    known = names(types)
    values = {}
    for name, value in parameters.items():
        if name not in known:
            raise InvalidArgument(
                f"sampling_parameters: {name[:80]}: {types.title} has no such parameter"
                f"{nearest(name, known)}"
            )
        try:
            values[name] = convert(value, types.sampling_params.get(name, ["str"]))
        except ValueError as error:
            given = f"{name}={shortened(value)}"
            raise InvalidArgument(f"sampling_parameters: {given}: {error}") from error
    if MADE in (values.get("extra_args") or ()):
        raise InvalidArgument(f"sampling_parameters: extra_args.{MADE}: is not for clients")
    if isinstance(structured := values.get("structured_outputs"), dict):
        values["structured_outputs"] = _structured(structured, types)
    if isinstance(bias := values.get("logit_bias"), dict):
        values["logit_bias"] = _by_token(bias)
    return values


def parse_json(text: str) -> dict[str, Any]:
    """Parse the input ``sampling_parameters``, a JSON object; raises E1005."""
    try:
        parameters = client_json.parse(text or "{}")
    except ValueError as error:
        raise InvalidArgument(f"sampling_parameters: not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise InvalidArgument(f"sampling_parameters: must be a JSON object, is {text[:80]!r}")
    return parameters


def _structured(fields: Mapping[str, Any], types: ArgumentTypes) -> dict[str, Any]:
    known = types.record["structured_outputs"]
    values = {}
    for name, value in fields.items():
        at = f"sampling_parameters: structured_outputs.{name}"
        if name not in known:
            raise InvalidArgument(f"{at}: no such constraint{nearest(name, list(known))}")
        try:
            values[name] = convert(value, known[name])
        except ValueError as error:
            raise InvalidArgument(f"{at}={shortened(value)}: {error}") from error
    return values


def _by_token(bias: Mapping[str, Any]) -> dict[int, float]:
    """A logit bias by token id; JSON has keys of text only."""
    try:
        return {int(token): float(value) for token, value in bias.items()}
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"sampling_parameters: logit_bias={bias!r}: must give a number for each token id"
        ) from error


# End ids of a model, which vLLM adds to the stop_token_ids of a request.
_END_IDS = 16


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Worker limits: sizes in words or token ids; None where there is no limit."""

    vocab_size: int
    bad_words: int | None = None
    bad_word_tokens: int | None = None
    allowed_token_ids: int | None = None
    logit_bias: int | None = None
    stop_token_ids: int | None = None

    def check(self, params: Any, bad_words: Sequence[Sequence[int]] = ()) -> None:
        """Check SamplingParams and the token ids of its bad words; raises E1005."""
        _at_most(self.bad_words, len(bad_words), "bad_words: {} words")
        _at_most(self.bad_word_tokens, sum(map(len, bad_words)), "bad_words: {} tokens in all")
        for token in (token for word in bad_words for token in word):
            if not 0 <= token < self.vocab_size:
                raise InvalidArgument(
                    f"bad_words: holds token {token}; must be from 0 to {self.vocab_size - 1}, the"
                    " model's vocabulary"
                )
        _at_most(self.allowed_token_ids, _size(params.allowed_token_ids), "allowed_token_ids: {}")
        _at_most(self.logit_bias, _size(params.logit_bias), "logit_bias: {} tokens")
        if params.min_tokens and self.stop_token_ids is not None:
            most = self.stop_token_ids - _END_IDS
            _at_most(most, _size(params.stop_token_ids), "min_tokens with {} stop_token_ids")


def _size(values: Any) -> int:
    return len(values) if values else 0


def _at_most(limit: int | None, found: int, what: str) -> None:
    if limit is not None and found > limit:
        raise InvalidArgument(f"{what.format(found)}; must be at most {limit} on this engine")
