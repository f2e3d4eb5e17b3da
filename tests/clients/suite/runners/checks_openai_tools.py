"""openai: tool calls, whole and streamed, and an agent loop."""

from __future__ import annotations

import json

import agent_tools
from agent_tools import TOOLS
from checks import check
from openai_client import ASK, CLIENT, MODEL


@check
def tools_auto() -> None:
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, temperature=0, max_tokens=60
    )
    message = answer.choices[0].message
    assert message.content or message.tool_calls
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=ASK, tools=TOOLS, temperature=0, max_tokens=60
    ) as stream:
        assert stream.get_final_completion().choices[0].message.content == message.content


@check
def tools_required_named_and_none() -> None:
    def calls(choice: object, **fields: object) -> list:
        given = {"model": MODEL, "messages": ASK, "tools": TOOLS, "temperature": 0}
        answer = CLIENT.chat.completions.create(
            **given, max_tokens=300, tool_choice=choice, **fields
        )
        return answer.choices[0].message.tool_calls or []

    assert calls("required")
    assert len(calls("required", parallel_tool_calls=False)) == 1
    (named,) = calls({"type": "function", "function": {"name": "add"}})
    assert named.function.name == "add"
    assert json.loads(named.function.arguments).keys() == {"a", "b"}
    assert calls("none") == []


@check
def tool_deltas_joined_are_the_whole_call() -> None:
    given = {"model": MODEL, "messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 300}
    whole = CLIENT.chat.completions.create(**given, tool_choice="required")
    with CLIENT.chat.completions.stream(**given, tool_choice="required") as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    expected, found = (one.choices[0].message.tool_calls for one in (whole, final))
    assert [(c.function.name, c.function.arguments) for c in found] == [
        (c.function.name, c.function.arguments) for c in expected
    ]


@check
def agent_loop_of_two_tools_and_three_turns() -> str:
    """Each turn must call a tool that was not used yet; the last one, none."""
    messages = [{"role": "user", "content": agent_tools.TASK}]
    used, told = set(), []
    for _ in range(3):
        left = [tool for tool in TOOLS if tool["function"]["name"] not in used]
        answer = CLIENT.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=left or TOOLS,
            tool_choice="required" if left else "none",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=300,
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            result = agent_tools.call(call.function.name, json.loads(call.function.arguments))
            used.add(call.function.name)
            told.append(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert used == {"temperature", "add"}
    assert message.content
    return f"{told}: {message.content}"
