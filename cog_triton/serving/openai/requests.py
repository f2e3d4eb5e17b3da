"""Request bodies of /v1/chat/completions and /v1/completions, parsed into typed requests.

Clients send many fields that are not supported here. One that would change the answer is accepted
only with a value that has no effect, else rejected by name, as are misspelt ones; what cannot
change it is ignored, with a note in the log if it is unknown.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cog_triton.engines.base import Abilities
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import BadMessages, InvalidArgument
from cog_triton.serving.openai.request_fields import (
    AllowedToolsChoice,
    GuideFields,
    HashableFailFast,
    ToolChoice,
    Tools,
    check_tools,
)
from cog_triton.system.log_notes import UnknownNames
from cog_triton.system.printable import shortened
from cog_triton.text.sampling import (
    ABILITIES,
    MAX_TOKENS,
    SAMPLING,
    SamplingParams,
    bounds,
    resolve_seed,
)

_log = logging.getLogger(__name__)


def _without_fraction(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_without_fraction)]
"""A whole number, which some clients write as 1.0."""
# The bound comes first, so that the JSON Schema tells it.
Count = Annotated[int, Field(ge=1), BeforeValidator(_without_fraction)]
_MOST_LOG_PROBS = 20


def _sampled(name: str) -> Any:
    """A field of the table, with its bounds."""
    return Field(default=None, **bounds(name))


# Else each of a million wrong items would be an error of its own.
_FAIL_FAST = HashableFailFast()
Prompts = (
    str
    | Annotated[list[str], _FAIL_FAST]
    | Annotated[list[int], _FAIL_FAST]
    | Annotated[list[Annotated[list[int], _FAIL_FAST]], _FAIL_FAST]
)
"""Texts, or token ids: one of either, or several."""


def listed(given: Prompts) -> list[str | list[int]]:
    """The prompts one by one, at least one; an empty list is a blank one."""
    if isinstance(given, str):
        return [given]
    several: list[str | list[int]] = [item for item in given if not isinstance(item, int)]
    return several or [[item for item in given if isinstance(item, int)]]


# Of the other endpoint: an answer that ignores it answers nothing.
_PROMPTS = ("messages", "prompt", "input", "suffix")
_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_CHATS = "only chats have it"

# Field -> values that do not change the answer, and the reason why others are rejected.
_NO_OP_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((None, True), "the answer is always a new message"),
    "audio": (_EMPTY, "this server answers text alone"),
    "bad_words": (_EMPTY, "not passed to the engine"),
    "best_of": ((None, 1), "only completions have it"),
    "chat_template": (_EMPTY, "the model's own is used"),
    "chat_template_kwargs": (_EMPTY, _CHATS),
    "continue_final_message": ((None, False), "the answer is always a new message"),
    "documents": (_EMPTY, "put them into messages"),
    "early_stopping": ((None, False), "it only has meaning in beam search"),
    "echo": ((None, False), "only completions have it"),
    "function_call": ((None, "none", "auto"), "use tool_choice"),
    "functions": (_EMPTY, "use tools"),
    "guided_whitespace_pattern": (_EMPTY, "the engine's own is used"),
    "include_reasoning": ((None, True), _CHATS),
    "include_stop_str_in_output": ((None, False), "stop strings are never part of the text"),
    "length_penalty": ((None, 1), "it only has meaning in beam search"),
    "logprob_token_ids": (_EMPTY, "use top_logprobs"),
    "lora_request": (_EMPTY, "name the adapter as model"),
    "mm_processor_kwargs": (_EMPTY, "this server reads text alone"),
    "modalities": ((None, ["text"]), "this server answers text alone"),
    "prompt_embeds": (_EMPTY, "this server reads text alone"),
    "prompt_ignore_length": ((None, 0), "penalties are the engine's own"),
    "prompt_logprobs": ((None,), "use echo with logprobs in completions"),
    "prompt_token_ids": (_EMPTY, "use prompt in completions"),
    "reasoning_effort": ((None,), _CHATS),
    "repetition_detection": ((None,), "not passed to the engine"),
    "skip_special_tokens": ((None, True), "special tokens are never part of the text"),
    "spaces_between_special_tokens": ((None, True), "special tokens are never part of the text"),
    "suffix": (_EMPTY, "text is not inserted"),
    "thinking": ((None,), "use reasoning_effort"),
    "thinking_token_budget": ((None,), "use reasoning_effort"),
    "tool_choice": ((None, "none", "auto"), _CHATS),
    "tools": (_EMPTY, _CHATS),
    "top_p_min": ((None, 0), "use top_p"),
    "truncate_prompt_tokens": ((None,), "prompts are not shortened"),
    "use_beam_search": ((None, False), "beam search is not supported"),
    "vllm_xargs": (_EMPTY, "not passed to the engine"),
    "watermarking": ((None, False), "not passed to the engine"),
    "web_search_options": ((None,), "this server searches nothing"),
}
# They describe the caller, are for a store that there is not, or ask for speed or a style that
# models of chat templates know nothing of: no text depends on them.
_IGNORED_FIELDS = (
    "guided_decoding_backend",
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
)


class StreamOptions(BaseModel):
    """How a stream is told; without `include_usage` it has no token counts.

    `continuous_usage_stats` is vLLM's: the counts so far in every piece, not only at the end.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class OpenAIRequest(GuideFields, ABC):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    n: Count | None = None
    max_tokens: int | None = _sampled("max_tokens")
    min_tokens: int | None = _sampled("min_tokens")
    temperature: float | None = _sampled("temperature")
    top_p: float | None = _sampled("top_p")
    top_k: int | None = _sampled("top_k")
    presence_penalty: float | None = _sampled("presence_penalty")
    frequency_penalty: float | None = _sampled("frequency_penalty")
    repetition_penalty: float | None = _sampled("repetition_penalty")
    seed: int | None = _sampled("seed")
    min_p: float | None = _sampled("min_p")
    logit_bias: dict[str, float] | None = _sampled("logit_bias")
    allowed_token_ids: Annotated[list[int], _FAIL_FAST] | None = _sampled("allowed_token_ids")
    stop: str | Annotated[list[str], _FAIL_FAST] | None = None
    stop_token_ids: Annotated[list[int], _FAIL_FAST] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Whole | None = None

    @property
    def limit(self) -> int:
        """Maximum number of tokens to generate; the engine's own limit is applied later."""
        return self.max_tokens or MAX_TOKENS

    @property
    def shown(self) -> int:
        """Choices to answer for each prompt."""
        return self.n or 1

    @property
    def made(self) -> int:
        """Sequences to generate for each prompt."""
        return self.shown

    @property
    def prompt_count(self) -> int:
        """Number of prompts."""
        return 1

    @property
    @abstractmethod
    def log_probs(self) -> bool:
        """Whether log probabilities of the sampled tokens are requested."""

    @property
    @abstractmethod
    def top_log_probs(self) -> int:
        """How many of the likeliest tokens are requested beside each."""

    @property
    def prompt_log_probs(self) -> bool:
        """Whether log probabilities of the prompt's tokens are requested."""
        return False

    def engine_request(self, defaults: Mapping[str, float]) -> EngineRequest:
        """What is asked of the engine, but for prompt, adapter and guide; raises E1005.

        `defaults` are the model's own, of sampling parameters.
        """
        return EngineRequest(
            input_ids=(),
            sampling=self.sampling(defaults),
            end_id=-1 if self.ignore_eos else None,
            return_log_probs=self.log_probs or self.made > self.shown,
            top_log_probs=self.top_log_probs,
            prompt_log_probs=self.prompt_log_probs,
        )

    def sampling(self, defaults: Mapping[str, float] = MappingProxyType({})) -> SamplingParams:
        """Sampling parameters; of absent fields the `defaults`, else OpenAI's; raises E1005."""
        given: dict[str, Any] = {"top_p": 1.0, **defaults, "seed": resolve_seed(None)}
        for item in SAMPLING:
            if item.body is not None and (value := getattr(self, item.name)) is not None:
                given[item.name] = item.read(value)
        return SamplingParams(**{**given, "max_tokens": self.limit})

    def stops(self) -> list[str] | None:
        """Stop strings; None for the server's default."""
        if self.stop is None:
            return None
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if "" in stops:
            raise InvalidArgument("stop: a stop string must not be empty")
        return stops


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions; each message has a role and content."""

    messages: Any
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOG_PROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int:
        """See `OpenAIRequest.limit`; `max_completion_tokens` is the newer name, and wins."""
        return self.max_completion_tokens or self.max_tokens or MAX_TOKENS

    def narrowed(self) -> Self:
        """The request with no other tools than those that its choice allows."""
        if not isinstance(self.tool_choice, AllowedToolsChoice):
            return self
        allowed = self.tool_choice.allowed_tools
        names = {tool.function.name for tool in allowed.tools}
        tools = [tool for tool in self.tools or () if tool.function.name in names]
        return self.model_copy(update={"tools": tools, "tool_choice": allowed.mode})

    @property
    def log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def top_log_probs(self) -> int:
        return self.top_logprobs or 0


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions; each prompt is a text, or token ids."""

    prompt: Prompts
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    best_of: Count | None = None
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOG_PROBS)
    echo: bool | None = None

    @property
    def limit(self) -> int:
        """See `OpenAIRequest.limit`; of 0 tokens one is made, and left out."""
        return MAX_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def made(self) -> int:
        return self.best_of or self.shown

    @property
    def prompt_count(self) -> int:
        return len(self.prompts())

    @property
    def log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def top_log_probs(self) -> int:
        return self.logprobs or 0

    @property
    def prompt_log_probs(self) -> bool:
        return bool(self.echo) and self.log_probs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, at least one; an empty list is a blank one."""
        return listed(self.prompt)


R = TypeVar("R", bound=OpenAIRequest)
M = TypeVar("M", bound=BaseModel)


def parse(kind: type[R], body: Any) -> R:
    """Parse a request from its JSON value; raises E1005, or E1006 if messages are missing."""
    if not isinstance(body, dict):
        raise InvalidArgument("the body must be a JSON object")
    if kind is ChatRequest and "messages" not in body:
        raise BadMessages("messages: missing; it is required")
    fields = dict(body)
    known = [*kind.model_fields, *_NO_OP_VALUES, *_IGNORED_FIELDS]
    unknown = UnknownNames(_log, "request field", known)
    for name in body.keys() - {field.alias or key for key, field in kind.model_fields.items()}:
        _check_unsupported(name, fields.pop(name), unknown)
    request = validate(kind, fields)
    _check_combinations(request)
    return request.narrowed() if isinstance(request, ChatRequest) else request


def validate(kind: type[M], body: Any) -> M:
    """Validate a JSON value; raises E1005 naming the first field at fault."""
    if not isinstance(body, dict):
        raise InvalidArgument("the body must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise InvalidArgument(_describe(error)) from None


def _check_unsupported(name: str, value: Any, unknown: UnknownNames) -> None:
    """Reject a field outside the schema, unless its value has no effect."""
    if name in _IGNORED_FIELDS:
        return
    if name in _NO_OP_VALUES:
        allowed, reason = _NO_OP_VALUES[name]
        if any(type(value) is type(item) and value == item for item in allowed):
            return
        if isinstance(value, float) and value in [x for x in allowed if type(x) is int]:
            return
        raise InvalidArgument(f"{name}={shortened(value)}: not supported: {reason}")
    hint = unknown.hint(name)
    if hint or name in _PROMPTS:
        shown = name[:80] if name.isidentifier() else shortened(name)
        raise InvalidArgument(f"{shown}: unknown field{hint}")


def _check_combinations(request: OpenAIRequest) -> None:
    """Check the rules between fields."""
    form = request.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise InvalidArgument("response_format: json_schema goes with type 'json_schema'")
    options = request.stream_options if request.stream else None
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise InvalidArgument(
            "stream_options.continuous_usage_stats: only allowed when include_usage is true"
        )
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidArgument("top_logprobs: only allowed when logprobs is true")
        check_tools(request.tools or [], request.tool_choice)
    if isinstance(request, CompletionRequest) and request.best_of is not None:
        if request.best_of < request.shown:
            raise InvalidArgument(f"best_of={request.best_of}: must not be less than n={request.n}")
        if request.stream and request.best_of > request.shown:
            raise InvalidArgument("best_of: its answers cannot be streamed, unless n is the same")
    if isinstance(request, CompletionRequest) and request.max_tokens == 0 and not request.echo:
        raise InvalidArgument("max_tokens=0: only allowed with echo")


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part)[:80] for part in first["loc"] if _is_field_path(part))
    if first["type"] == "missing":
        return f"{where}: missing; it is required"
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown field"
    return f"{where}={shortened(first['input'])}: {first['msg'].lower()}"


def _is_field_path(part: object) -> bool:
    """Whether `part` of an error path is a field or index: Pydantic adds union members, too,
    such as `list[int]`."""
    return isinstance(part, int) or (
        isinstance(part, str) and part.isidentifier() and part != "str"
    )


def described(abilities: Abilities) -> dict[str, Any]:
    """What requests may ask for, by the names of their fields."""
    return {
        "guides": sorted(abilities.guides),
        **{name: name in abilities.sampling for name in ABILITIES},
        "top_logprobs": abilities.top_log_probs,
        "prompt_logprobs": abilities.prompt_log_probs,
    }


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
