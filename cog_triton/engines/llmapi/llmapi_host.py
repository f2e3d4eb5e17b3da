"""LLM API host process: runs `tensorrt_llm.LLM` for the Triton model ``tensorrt_llm``.

What the LLM API would ignore of a request is refused. It is the only module that imports
TensorRT-LLM 1.2 and later, and late: serving processes and Triton's stubs run without it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

from cog_triton.engines.async_loop import AsyncEngine
from cog_triton.engines.llmapi.llmapi_directory import LLMAPIModel, read_model
from cog_triton.engines.request import (
    EngineRequest,
    FinishReason,
    TokenEvent,
    check_prompt,
    note_length_penalty,
)
from cog_triton.engines.stop_words import StopWords, Tokens
from cog_triton.errors import (
    CogTritonError,
    EngineIncompatible,
    InvalidArgument,
    InvalidPredictorConfig,
    PromptTooLong,
    TritonUnknownError,
)

_OLDEST = (1, 2)
_PENALTIES_SINCE = (1, 3)
_REFUSALS = ("builtins:ValueError", "builtins:TypeError")
_REQUEST_ERROR = "RequestError"
_PROMPT_TOO_LONG = re.compile(
    r"should not exceed max_num_tokens|exceeds? max_seq_len|exceeds maximum input length"
)


def open_engine(arguments: Mapping[str, Any]) -> Any:
    """Load `tensorrt_llm.LLM`; raises E1305 without it or by its version, E1202 for a refusal."""
    try:
        import tensorrt_llm
    except ImportError as error:
        raise EngineIncompatible(
            "llmapi.yaml: TensorRT-LLM cannot be imported in the engine's Python: name one that has"
            f" it as tensorrt_llm.args.engine_python: {error}"
        ) from error
    if (release := _release(tensorrt_llm.__version__)) < _OLDEST:
        raise EngineIncompatible(
            f"TensorRT-LLM {tensorrt_llm.__version__}: the LLM API is served from 1.2 on, not"
            f" {release[0]}.{release[1]}"
        )
    try:
        return tensorrt_llm.LLM(**arguments)
    except CogTritonError:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidPredictorConfig(f"llmapi.yaml: TensorRT-LLM refuses it: {error}") from error


def heeds_penalties(arguments: Mapping[str, Any]) -> bool:
    """Whether the sampler heeds penalties: since 1.3, and before that TRTLLMSampler alone."""
    import tensorrt_llm

    chosen = arguments.get("sampler_type") == "TRTLLMSampler"
    return chosen or _release(tensorrt_llm.__version__) >= _PENALTIES_SINCE


def sampling_params(values: Mapping[str, Any]) -> Any:
    """SamplingParams of `values`, in which a guide is the arguments of its class; raises E1005."""
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.llmapi import GuidedDecodingParams

    made = dict(values)
    try:
        if (guide := made.get("guided_decoding")) is not None:
            made["guided_decoding"] = GuidedDecodingParams(**guide)
        return SamplingParams(**made)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"TensorRT-LLM refuses the request: {error}") from error


def coded_error(error: Exception) -> CogTritonError:
    """The coded error of what TensorRT-LLM raised for one request."""
    if isinstance(error, CogTritonError):
        return error
    names = {f"{cls.__module__}:{cls.__qualname__}" for cls in type(error).__mro__}
    if _PROMPT_TOO_LONG.search(str(error)):
        return PromptTooLong(str(error))
    if type(error).__name__ == _REQUEST_ERROR or not names.isdisjoint(_REFUSALS):
        return InvalidArgument(f"TensorRT-LLM refuses the request: {error}")
    return TritonUnknownError(f"TensorRT-LLM: {type(error).__name__}: {error}")


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
}


class OutputConverter:
    """Converts outputs of one request to token events; cuts end ids and stop words."""

    def __init__(self, request: EngineRequest, end_ids: Collection[int]) -> None:
        """`end_ids` are the model's own."""
        self._output = StopWords(request.stop_words, request.sampling.min_tokens)
        self._has_log_probs = request.return_log_probs
        self._end_ids = request.end_ids(frozenset(end_ids))
        self._seen = 0

    def convert(self, output: Any) -> TokenEvent | None:
        """The event for `output`, which has all tokens so far; None if nothing can be sent yet."""
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        reason = completion.finish_reason
        if reason is not None and reason not in _FINISH_REASONS:
            return failed(TritonUnknownError(f"TensorRT-LLM ended the request with {reason!r}"))
        if reason == "stop" and ids and ids[-1] in self._end_ids:
            ids.pop()
        for place in range(self._seen, len(ids)):
            log_prob = 0.0
            if self._has_log_probs:
                log_prob = _log_prob(completion.logprobs[place], ids[place])
            self._seen += 1
            if self._output.add(ids[place], log_prob):
                return self._event(self._output.rest(), "stop")
        if reason is not None:
            return self._event(self._output.rest(), _FINISH_REASONS[reason])
        ready = self._output.ready()
        return self._event(ready) if ready else None

    def _event(self, tokens: Tokens, finish: FinishReason | None = None) -> TokenEvent:
        log_probs = [value for _, value in tokens] if self._has_log_probs else []
        return TokenEvent([token for token, _ in tokens], log_probs, finish)


def failed(error: CogTritonError) -> TokenEvent:
    """The last event of a request that failed."""
    return TokenEvent([], [], error=error)


def _log_prob(value: Any, token: int) -> float:
    """Log probability of a token: the value itself, or one by token id beside the likeliest."""
    if isinstance(value, Mapping):
        value = value[token].logprob
    return float(value)


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


_log = logging.getLogger(__name__)


class LLMAPIHost(AsyncEngine):
    """LLM API host: one engine for every client; run by `cog_triton.backend.engine_process`."""

    def __init__(self, model: LLMAPIModel) -> None:
        super().__init__()
        self._model = model
        self._engine = open_engine(model.arguments)
        self._penalties = heeds_penalties(model.arguments)
        self.max_batch_size = model.max_batch_size
        self._outputs: dict[int, Any] = {}
        """TensorRT-LLM's RequestOutput of each request that is in the engine."""

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Load the engine that a rendered model's parameters describe."""
        return cls(read_model(Path(parameters["engine_dir"])))

    async def start(self, number: int, request: EngineRequest) -> None:
        """See `AsyncEngine.start`."""
        model = self._model
        check_prompt(request, max_seq_len=model.max_seq_len, max_input_len=model.max_input_len)
        values = from_engine_request(request, penalties=self._penalties)
        params = sampling_params(values)
        converter = OutputConverter(request, model.end_ids)
        outputs = self._engine.generate_async(list(request.input_ids), params, streaming=True)
        self._outputs[number] = outputs
        try:
            async for output in outputs:
                if (event := converter.convert(output)) is not None:
                    self.emit(number, event)
                if not self.server.runs(number):
                    if not output.finished:  # at a stop word
                        self.abort(number)
                    return
        finally:
            self._outputs.pop(number, None)
        raise TritonUnknownError("TensorRT-LLM ended the request without a reason")

    def abort(self, number: int) -> None:
        """See `AsyncEngine.abort`."""
        if (output := self._outputs.pop(number, None)) is not None:
            output.abort()

    def coded_error(self, error: Exception) -> CogTritonError:
        """See `AsyncEngine.coded_error`."""
        coded = coded_error(error)
        if isinstance(coded, TritonUnknownError):
            _log.error("TensorRT-LLM failed a request", exc_info=error)
        return coded

    def shutdown(self, *, ordered: bool) -> None:
        """See `AsyncEngine.shutdown`."""
        self._engine.shutdown()
