"""langchain-openai: structured output, tools, and an agent loop."""

from __future__ import annotations

from typing import Literal

import agent_tools
import pydantic
from checks import check
from langchain_client import ASK, CHAT, TOOLS
from langchain_core.messages import HumanMessage, ToolMessage


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    large: bool


def structured(method: str) -> object:
    return CHAT.with_structured_output(City, method=method).invoke(ASK)


@check
def structured_output_by_json_schema() -> None:
    assert isinstance(structured("json_schema"), City)


@check
def structured_output_by_function_calling() -> None:
    assert isinstance(structured("function_calling"), City)


@check
def structured_output_by_json_mode() -> None:
    """Any JSON; the model need not know the schema."""
    raw = CHAT.with_structured_output(City, method="json_mode", include_raw=True).invoke(
        f"{ASK} Answer as JSON.", max_tokens=300
    )
    assert raw["raw"].content.lstrip()[:1] in ("{", "["), raw


@check
def tool_calls_streamed() -> None:
    bound = CHAT.bind_tools(TOOLS, tool_choice="add")
    pieces = list(bound.stream(ASK, max_tokens=300))
    (call,) = sum(pieces[1:], pieces[0]).tool_calls
    assert call["name"] == "add"
    assert call["args"].keys() == {"a", "b"}


@check
def tools_auto() -> None:
    answer = CHAT.bind_tools(TOOLS).invoke(ASK, max_tokens=60)
    assert answer.content or answer.tool_calls or answer.invalid_tool_calls


@check
def agent_loop_of_two_tools_and_three_turns() -> str:
    """Each turn must call a tool that was not used yet; the last one, none."""
    messages = [HumanMessage(agent_tools.TASK)]
    by_name = {one.name: one for one in TOOLS}
    used, told = set(), []
    for _ in range(3):
        left = [one for one in TOOLS if one.name not in used]
        model = CHAT.bind_tools(
            left or TOOLS,
            tool_choice="required" if left else "none",
            parallel_tool_calls=False,
            strict=True,
        )
        answer = model.invoke(messages, max_tokens=300)
        messages.append(answer)
        for call in answer.tool_calls:
            result = by_name[call["name"]].invoke(call)
            assert isinstance(result, ToolMessage)
            used.add(call["name"])
            told.append(f"{call['name']}({call['args']}) = {result.content}")
            messages.append(result)
    assert used == {*by_name}
    assert messages[-1].content
    return f"{told}: {messages[-1].content}"
