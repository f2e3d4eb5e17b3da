"""Fields of a request: tools and which of them to call, and what guides its answer.

Guides are in OpenAI's spelling and vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field

from cog_triton.engines.base import Abilities
from cog_triton.errors import InvalidArgument, nearest
from cog_triton.system.printable import shortened
from cog_triton.text.guide import Guide, choice_guide
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


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: FunctionName


class NamedTool(BaseModel):
    """The one tool that the model must call."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    """The tools that the model may call, of those that there are, and whether it must."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], HashableFailFast(), Field(min_length=1)]


class AllowedToolsChoice(BaseModel):
    """A choice among some of the tools."""

    model_config = ConfigDict(extra="forbid", strict=True)

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


_FORBID = ConfigDict(extra="forbid", strict=True)
Schema = dict[str, Any] | str
Choices = Annotated[list[str], HashableFailFast()]


class JSONSchema(BaseModel):
    """The schema that the answer is to follow."""

    model_config = _FORBID

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What the answer is made of."""

    model_config = _FORBID

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's constraints, of which there is one."""

    model_config = _FORBID

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
