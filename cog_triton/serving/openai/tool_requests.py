"""Tools of a chat request, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from cog_triton.errors import InvalidArgument, nearest
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


Tools = Annotated[list[Tool], HashableFailFast()]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise E1005 for two tools of a name, and for a choice that is not among the tools."""
    names = [tool.function.name for tool in tools]
    for place, tool in enumerate(tools):
        if tool.function.name in names[:place]:
            raise InvalidArgument(
                f"tools[{place}].function.name={tool.function.name!r}: is there twice"
            )
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise InvalidArgument(
                f"tools[{place}].function.parameters.type={str(kind)[:80]!r}: must be 'object'"
            )
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        name = choice.function.name
        raise InvalidArgument(
            f"tool_choice.function.name={name[:80]!r}: is not among the tools{nearest(name, names)}"
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
