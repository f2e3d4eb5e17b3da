"""Tools of a chat request, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from cog_triton.errors import InvalidArgument, nearest
from cog_triton.system.printable import shortened
from cog_triton.text.tool_schema import ToolFunction


class HashableFailFast(FailFast):
    """`FailFast` for members of a union, which Python hashes."""

    __hash__ = object.__hash__


class Function(BaseModel):
    """A function: its name, what it does, and a JSON Schema of its arguments.

    With `strict`, calls that are guided follow the whole schema, or the request is refused.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
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

    name: str


class NamedTool(BaseModel):
    """The one tool that the model must call."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: NamedFunction


MAX_TOOLS = 1024
_MOST_COMPARED = 64  # names that the client chose may all be near
Tools = Annotated[list[Tool], HashableFailFast(), Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


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
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        name = choice.function.name
        hint = nearest(name, list(names)[:_MOST_COMPARED])
        raise InvalidArgument(
            f"tool_choice.function.name={name[:80]!r}: is not among the tools{hint}"
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
