"""Request bodies of /v1/chat/completions and /v1/completions, parsed into typed requests.

Clients send many fields that are not supported here. A known field that would change the answer is
accepted only with a value that has no effect, else rejected by name. What cannot change the answer
is ignored, and so is an unknown field, with a note in the log.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
    field_validator,
)

from cog_triton.engines.base import Abilities
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import BadMessages, InvalidArgument, nearest
from cog_triton.serving.openai.request_body import given_fields
from cog_triton.system.log_notes import note_unknown
from cog_triton.system.printable import shortened
from cog_triton.text.chat import ROLES
from cog_triton.text.guide import Guide, choice_guide
from cog_triton.text.sampling import (
    ABILITIES,
    MAX_TOKENS,
    SAMPLING,
    SamplingParams,
    resolve_seed,
)
from cog_triton.text.tool_schema import OBJECT, ToolFunction


class HashableFailFast(FailFast):
    """`FailFast` for members of a union, which Python hashes."""

    __hash__ = object.__hash__


FunctionName = Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]
"""Name of a function: 64 characters in OpenAI's chats, 128 in its responses, and Anthropic's."""


class Function(BaseModel):
    """A function: its name, what it does, and a JSON Schema of its arguments.

    With `strict`, calls that are guided follow the whole schema, or the request is refused.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: Function


class Exact(BaseModel):
    """An object that has no other fields than these."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NamedFunction(Exact):
    """The name of a function."""

    name: FunctionName


class NamedTool(Exact):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Exact):
    """The tools that the model may call, of those that there are, and whether it must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], HashableFailFast(), Field(min_length=1)]


class AllowedToolsChoice(Exact):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


MAX_TOOLS = 1024
_MOST_COMPARED = 64  # names that the client chose may all be near
Tools = Annotated[list[Tool], HashableFailFast(), Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise E1005 for two tools of a name, and for a choice that is not among the tools."""
    names: dict[str, None] = {}
    for place, tool in enumerate(tools):
        if tool.function.name in names:
            raise InvalidArgument(
                f"tools[{place}].function.name={tool.function.name!r}: is there twice"
            )
        names[tool.function.name] = None
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise InvalidArgument(
                f"tools[{place}].function.parameters.type={shortened(kind)}: must be 'object'"
            )
    chosen = {"function": choice} if isinstance(choice, NamedTool) else {}
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools.tools
        chosen = {
            f"allowed_tools.tools[{place}].function": one for place, one in enumerate(allowed)
        }
    for where, named in chosen.items():
        if (name := named.function.name) not in names:
            hint = nearest(name, list(names)[:_MOST_COMPARED])
            raise InvalidArgument(
                f"tool_choice.{where}.name={name[:80]!r}: is not among the tools{hint}"
            )
    if choice == "required" and not tools:
        raise InvalidArgument("tool_choice='required': needs tools to choose from")


def functions(tools: Sequence[Tool]) -> list[ToolFunction]:
    """The functions, with the schemas of their arguments."""
    return [
        ToolFunction(
            f"tools[{place}].function.parameters",
            tool.function.name,
            tool.function.parameters or {"properties": {}, "additionalProperties": False},
            bool(tool.function.strict),
        )
        for place, tool in enumerate(tools)
    ]


Schema = dict[str, Any] | str
Choices = Annotated[list[str], HashableFailFast()]


class JSONSchema(Exact):
    """The schema that the answer is to follow."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Exact):
    """What the answer is made of."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputs(Exact):
    """vLLM's constraints, of which there is one."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


class GivenGuide(NamedTuple):
    """A guide, and the field that gave it."""

    field: str
    guide: Guide


class VLLMGuide(BaseModel):
    """vLLM's field, which all four APIs have."""

    structured_outputs: StructuredOutputs | None = None


class GuideFields(VLLMGuide):
    """Guides; `guided_*` are what vLLM called those of `structured_outputs` before 0.12."""

    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None

    def given_guide(self) -> GivenGuide | None:
        """The guide of the answer, None for free text; raises E1005."""
        outputs = self.structured_outputs
        own = {} if outputs is None else outputs.model_dump(by_alias=True, exclude_none=True)
        if outputs is not None and not own:
            raise InvalidArgument("structured_outputs: has no guide; send one, or leave it out")
        given = {f"structured_outputs.{kind}": value for kind, value in own.items()}
        given |= self.model_dump(
            include={name for name in GuideFields.model_fields if name.startswith("guided_")},
            exclude_none=True,
        )
        found = [_made(field, value) for field, value in given.items() if value is not False]
        if (form := self.response_format) is not None and form.type != "text":
            found.insert(0, GivenGuide("response_format", _of_format(form)))
        if len(found) > 1:
            raise InvalidArgument(
                f"{found[1].field}: not together with {found[0].field}: one guides the answer"
            )
        return found[0] if found else None


def _of_format(form: ResponseFormat) -> Guide:
    return Guide(
        "json_schema", json.dumps(form.json_schema.schema_) if form.json_schema else OBJECT
    )


def _made(field: str, value: Any) -> GivenGuide:
    kind = field.rpartition(".")[2].removeprefix("guided_")
    match kind:
        case "json":
            guide = Guide("json_schema", value if isinstance(value, str) else json.dumps(value))
        case "json_object":
            guide = Guide("json_schema", OBJECT)
        case "choice":
            guide = choice_guide(value, field)
        case "regex":
            guide = Guide("regex", value)
        case _:
            guide = Guide("grammar", value)
    return GivenGuide(field, guide)


def check_guide(given: GivenGuide | None, abilities: Abilities) -> Guide | None:
    """The guide, if the engine can follow it; raises E1005 naming the field otherwise."""
    if given is None:
        return None
    field, guide = given
    if guide.kind in abilities.guides:
        place = ".json_schema.schema" if field == "response_format" else ""
        abilities.check_guide(guide, f"{field}{place}")
        return guide
    if not abilities.guides:
        rule = "only type 'text' is supported" if field == "response_format" else "not supported"
        raise InvalidArgument(f"{field}: {rule}: this engine has no guided decoding")
    known = ", ".join(sorted(abilities.guides))
    raise InvalidArgument(f"{field}: not supported: this engine is guided by {known} alone")


_log = logging.getLogger(__name__)


def without_fraction(value: Any) -> Any:
    """A whole number that is written as 1.0 as an integer; any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_MOST_LOG_PROBS = 20
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


_EMPTY: tuple[Any, ...] = ([], {}, "")
_CHATS = "only chats have it"
_PROMPTS = "a chat has messages, a completion a prompt"
_TEXTS = "answers have texts, no token ids"

# Field -> values that do not change the answer, and the reason why others are rejected.
_NO_OP_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((True,), "the answer is always a new message"),
    "audio": (_EMPTY, "this server answers text alone"),
    "bad_words": (_EMPTY, "not passed to the engine"),
    "best_of": ((1,), "only completions have it"),
    "chat_template": (_EMPTY, "the model's own is used"),
    "chat_template_kwargs": (_EMPTY, _CHATS),
    "continue_final_message": ((False,), "the answer is always a new message"),
    "documents": (_EMPTY, "put them into messages"),
    "early_stopping": ((False,), "it only has meaning in beam search"),
    "echo": ((False,), "only completions have it"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "functions": (_EMPTY, "use tools"),
    "guided_whitespace_pattern": (_EMPTY, "the engine's own is used"),
    "include_reasoning": ((True,), _CHATS),
    "include_stop_str_in_output": ((False,), "stop strings are never part of the text"),
    "input": (_EMPTY, _PROMPTS),
    "length_penalty": ((1,), "it only has meaning in beam search"),
    "logprob_token_ids": (_EMPTY, "use top_logprobs"),
    "lora_request": (_EMPTY, "name the adapter as model"),
    "max_completion_tokens": ((), "use max_tokens"),
    "messages": (_EMPTY, _PROMPTS),
    "mm_processor_kwargs": (_EMPTY, "this server reads text alone"),
    "modalities": ((["text"],), "this server answers text alone"),
    "moderation": ((), "nothing is moderated here"),
    "prompt": (_EMPTY, _PROMPTS),
    "prompt_embeds": (_EMPTY, "this server reads text alone"),
    "prompt_ignore_length": ((0,), "penalties are the engine's own"),
    "prompt_logprobs": ((), "use echo with logprobs in completions"),
    "prompt_token_ids": (_EMPTY, "use prompt in completions"),
    "reasoning_effort": ((), _CHATS),
    "repetition_detection": ((), "not passed to the engine"),
    "return_token_ids": ((False,), _TEXTS),
    "return_tokens_as_token_ids": ((False,), _TEXTS),
    "skip_special_tokens": ((True,), "special tokens are never part of the text"),
    "spaces_between_special_tokens": ((True,), "special tokens are never part of the text"),
    "stop_sequences": (_EMPTY, "use stop"),
    "suffix": (_EMPTY, "text is not inserted"),
    "thinking": ((), "use reasoning_effort"),
    "thinking_token_budget": ((), "use reasoning_effort"),
    "tool_choice": (("none", "auto"), _CHATS),
    "tools": (_EMPTY, _CHATS),
    "top_logprobs": ((0,), "use logprobs"),
    "top_p_min": ((0,), "use top_p"),
    "truncate_prompt_tokens": ((), "prompts are not shortened"),
    "use_beam_search": ((False,), "beam search is not supported"),
    "vllm_xargs": (_EMPTY, "not passed to the engine"),
    "watermarking": ((False,), "not passed to the engine"),
    "web_search_options": ((), "this server searches nothing"),
}
# They describe the caller, are for a store that there is not, or ask for speed or a style that
# models of chat templates know nothing of: no text depends on them.
_IGNORED_FIELDS = (
    "guided_decoding_backend",
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
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

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


_TYPES = get_type_hints(SamplingParams)
_WHOLE = [
    *("n", "best_of", "max_completion_tokens", "max_output_tokens", "logprobs", "top_logprobs"),
    *("priority", *(item.name for item in SAMPLING if _TYPES[item.name] is int)),
]
"""Whole numbers, which some clients write as 1.0."""
_BODY_TYPES: Mapping[Any, Any] = {
    Mapping[int, float]: dict[str, float],
    tuple[int, ...]: Annotated[list[int], _FAIL_FAST],
}
"""Types of the table, and what JSON has for them."""
_ROWS: dict[str, Any] = {
    item.name: (
        _BODY_TYPES.get(kind := _TYPES[item.name], kind) | None,
        Field(default=None, **item.body),
    )
    for item in SAMPLING
    if item.body is not None
}
_Sampled = create_model("_Sampled", **_ROWS)


class SampledRequest(VLLMGuide, _Sampled):  # type: ignore[misc, valid-type]
    """Fields of all four APIs: the table of sampling parameters, and others of one meaning."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    stop_token_ids: Annotated[list[int], _FAIL_FAST] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None

    _whole = field_validator(*_WHOLE, mode="before", check_fields=False)(without_fraction)


class ChatFields(SampledRequest):
    """Fields of the three APIs of chats."""

    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None


class OpenAIRequest(GuideFields, SampledRequest, ABC):
    """Fields of both endpoints."""

    n: int | None = Field(default=None, ge=1)
    stop: str | Annotated[list[str], _FAIL_FAST] | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None

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


Messages = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"enum": list(ROLES)},
                    "content": {"type": ["string", "array", "null"], "items": {"type": "object"}},
                },
            },
        }
    ),
]
"""Messages of a chat, which `text.chat` checks."""


class ChatRequest(OpenAIRequest, ChatFields):
    """POST /v1/chat/completions; each message has a role and content."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOG_PROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

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
    best_of: int | None = Field(default=None, ge=1)
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
    if kind is ChatRequest and "messages" not in given_fields(body, {}):
        raise BadMessages("messages: missing; it is required")
    neutral = {
        **_NO_OP_VALUES,
        "add_special_tokens": ((kind is CompletionRequest,), "prompts have those of the model"),
    }
    request = parse_known(kind, body, neutral, _IGNORED_FIELDS)
    _check_combinations(request)
    return request.narrowed() if isinstance(request, ChatRequest) else request


def parse_known(
    kind: type[M],
    body: Any,
    neutral: Mapping[str, tuple[Sequence[Any], str]],
    ignored: Collection[str] = (),
) -> M:
    """The fields of a JSON value that `kind` has; raises E1005.

    Of the `neutral` others, those values are taken that change nothing, and the rest refused for
    the reason. What is unknown is ignored, with a note.
    """
    given = given_fields(body, {})
    known = kind.model_fields
    note_unknown(_log, "request field", given.keys() - {*known, *neutral, *ignored})
    for name in given.keys() & neutral.keys() - known.keys():
        _check_neutral(name, given[name], *neutral[name])
    return validate(kind, {name: value for name, value in given.items() if name in known})


def known_fields(kind: type[OpenAIRequest]) -> set[str]:
    """Names of the fields that are taken, refused unless neutral, or without effect."""
    return {*kind.model_fields, *_NO_OP_VALUES, *_IGNORED_FIELDS, "add_special_tokens"}


def validate(kind: type[M], body: Any) -> M:
    """Validate a JSON value; raises E1005 naming the first field at fault."""
    if not isinstance(body, dict):
        raise InvalidArgument("the body must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise InvalidArgument(_describe(error)) from None


def _check_neutral(name: str, value: Any, allowed: Sequence[Any], reason: str) -> None:
    """Reject a field outside the schema, unless its value has no effect."""
    if any(type(value) is type(item) and value == item for item in allowed):
        return
    if isinstance(value, float) and value in [x for x in allowed if type(x) is int]:
        return
    raise InvalidArgument(f"{name}={shortened(value)}: not supported: {reason}")


def _check_combinations(request: OpenAIRequest) -> None:
    form = request.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise InvalidArgument("response_format: json_schema goes with type 'json_schema'")
    options = request.stream_options if request.stream else None
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise InvalidArgument(
            "stream_options.continuous_usage_stats: only allowed when include_usage is true"
        )
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
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
